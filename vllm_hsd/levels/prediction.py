"""Predicted text: what a request says that its answer will mostly be."""

from __future__ import annotations

from typing import Any

from vllm_hsd.levels.base import Keys, LookupKeys


class PredictionConfig(Keys):
    """Predicted text; requests give it, so there is nothing to configure."""


class PredictionLevelConfig(LookupKeys):
    """Predicted text, of requests with `hsd_prediction`; others draft nothing from it."""

    kind = "prediction"
    value_keys = PredictionConfig
    drafts_by = "lookup"

    prediction: PredictionConfig

    def build(self, speculator: Any, index: int) -> Any:
        """The lookup, with room for a prediction as long as the longest text."""
        from vllm_hsd.cascade.prediction_lookup import PredictionLookup

        width = speculator.vllm_config.model_config.max_model_len
        return PredictionLookup(speculator.max_num_reqs, width, speculator.device)
