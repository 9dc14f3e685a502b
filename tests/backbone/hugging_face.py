"""Networks of the package ``transformers``, to compare with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import torchaudio  # noqa: F401
except ImportError:
    pass
except OSError:
    # Built for another torch. transformers would import it for features that are not used here, and fail.
    sys.modules["torchaudio"] = None  # type: ignore[assignment]

transformers = pytest.importorskip("transformers")

TEXT = 61


def other(folder: Path) -> Any:
    """The folder as transformers loads it; no key may be left over or missing."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    assert not problems, problems
    return model.eval()


def hugging_face(kind: str, folder: Path, **changes: Any) -> Any:
    """A random Hugging Face network with biases that decide, saved into ``folder``."""
    shape = {
        "vocab_size": TEXT,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 3e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
        "head_dim": 16,
    }
    if kind == "moe":
        experts = {"moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 6, "moe_layer_start_index": 0}
        config = transformers.Ernie4_5_MoeConfig(**(shape | experts | changes))
        model = transformers.Ernie4_5_MoeForCausalLM(config)
    else:
        model = transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**(shape | changes)))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    return model.eval()
