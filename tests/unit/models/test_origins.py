"""Where models came from: which names are those of one model."""

from __future__ import annotations

import pytest

from decodery.models.loaders.origins import same_model
from decodery.models.loaders.package_index import gguf_path

CODER = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
SAME = (
    "/m/qwen2.5-coder-1.5b-instruct/",
    "/m/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "/m/Qwen2.5-Coder-1.5B-Instruct.IQ4_XS.gguf",
    "/m/Qwen2.5-Coder-1.5B-Instruct-UD-Q4_K_XL.gguf",
    "C:\\m\\qwen2.5-coder-1.5b-instruct-fp16-00001-of-00002.gguf",
    "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:q4_k_m",
    "/hub/models--Qwen--Qwen2.5-Coder-1.5B-Instruct/snapshots/2e1fd397",
    "/hub/models--Qwen--Qwen2.5-Coder-1.5B-Instruct-GGUF/snapshots/2e1f/qwen2.5-coder-1.5b-instruct-q8_0.gguf",
)
OTHERS = (
    "",
    "/m/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "/hub/models--Qwen--Qwen2.5-Coder-1.5B/snapshots/2e1fd397",
    "/m/qwen2.5-coder-1.5b-q4_k_m.gguf",
)


@pytest.mark.parametrize("place", SAME)
def test_a_model_has_one_name_wherever_it_is(place: str) -> None:
    assert same_model(CODER, place) and same_model(place, CODER)


@pytest.mark.parametrize("place", OTHERS)
def test_other_models_have_other_names(place: str) -> None:
    assert not same_model(CODER, place) and not same_model("", "")


def test_the_embedded_model_is_the_one_that_its_file_is_named_after() -> None:
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert same_model("smollm2", name) and same_model(str(gguf_path("smollm2")), name)
    assert not same_model("smollm2", "HuggingFaceTB/SmolLM2-360M-Instruct") and not same_model("a/smollm2-x", name)
