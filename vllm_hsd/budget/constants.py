"""Every number that the budget was given rather than learns: fifteen, each with its reason."""

# Calibration bins: places in a draft (later ones count as the last), and values of the drafter's
# own estimate of a token.
PLACES, BINS = 4, 8
# What a drafter that gives no estimate is taken to be worth before anything is known.
PRIOR_ACCEPTANCE = 0.7
# Observations that what was expected before them weighs: accepted tokens of a bin, or of a request,
# and passes of a size, from which on a residual is the machine's.
PRIOR_WEIGHT = 5.0
# Tokens that a place remembers: older ones fade with every new one, and only then. A place that is
# not drafted keeps what is known of it; else short drafts would never grow again.
REMEMBERED = 500.0
# Decay of what is known of a request with each of its drafts, of a pass's time with each other
# pass, and of what lookups gain with each search.
MEMORY = 0.98
# Decay with each step of what pays, which changes with the text, and of the machine's speed.
SHORT_MEMORY = 0.9
# A difference of logarithms that is no noise: times that fall with more rows, drafts that gain.
NOTICEABLE = 0.1
# One residual moves an estimate by a factor of at most e^0.3: a stalled step is an outlier.
MOST_LOG_RESIDUAL = 0.3
# Steps of a trial: the first one has no draft to verify, a model may have to catch up in it, and a
# single request has to verify enough tokens to tell.
TRIAL_STEPS = 6
# Steps before the second trial; the pause doubles while the option loses.
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
# Steps without a search where searches do not pay: they tell by themselves what they would gain.
SEARCH_PAUSE = 8
# Of the time since the last one, what a trial spends at most on drafts and on reading before them.
TRIAL_SHARE = 0.05
# Answers whose lengths are known.
ANSWERS = 64
