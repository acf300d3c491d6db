"""What serving does not import: bench, verify, profile, plan, doctor, the reference engine."""
