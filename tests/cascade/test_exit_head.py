"""Exit heads: the file, the logits, and training against the target's last layer."""

import pytest
import torch

from vllm_hsd.cascade.exit_head import ExitHead, read_exit_head, write_exit_head
from vllm_hsd.tools.audit.tiny_models import tiny_llama
from vllm_hsd.tools.exit_head_training import train_heads

VOCABULARY = 64


def test_file_round_trip(tmp_path):
    head = ExitHead(2, torch.randn(8), torch.randn(5, 8), 1e-6)
    write_exit_head(head, tmp_path / "new" / "layer-2")
    again = read_exit_head(str(tmp_path / "new" / "layer-2"))
    assert (again.layer, again.eps) == (2, 1e-6)
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(again.logits(hidden), head.logits(hidden), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_training_comes_nearer_to_the_target(tied):
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": 64, "tie_word_embeddings": tied}
    model = tiny_llama(VOCABULARY, **sizes)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    text = torch.randint(VOCABULARY, (64 * 20,), generator=torch.Generator().manual_seed(0))
    for layer, trained in enumerate(train_heads(model, [0, 1, 2], text, steps=60)):
        assert trained.head.layer == layer
        assert trained.after.divergence < 0.9 * trained.before.divergence
        assert trained.after.overlap > trained.before.overlap
        assert not trained.head.weight.requires_grad
    assert layer == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), f"training changed the target's {name}"
