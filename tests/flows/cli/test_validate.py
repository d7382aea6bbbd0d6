"""`alto validate` on a good file and on files that are wrong in each of the three ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from alto_core.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[3]
Invoke = Callable[..., Any]
Content = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose weights are not its own (validate must not read them), and forty rows."""
    words = ["<unk>", "</s>", *(str(number) for number in range(60)), "plus", "is"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(
        tmp_path / "model"
    )
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")
    save_file({}, tmp_path / "model" / "model.safetensors")
    rows = [{"prompt": f"{i} plus {j} is", "completion": f" {i + j}"} for i in range(8) for j in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def content() -> Content:
    return {
        "name": "sums",
        "model": {"name": "./model"},
        "data": {"source": "train.jsonl", "validation": {"rows": 8}},
        "search_space": {"learning_rate": [1e-3, 1e-2], "lora_rank": [2, 4], "adapter_batch_size": [4, 8]},
        "budget": {"epochs": 2},
    }


def _write(folder: Path, content: Content) -> str:
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_good_file_says_what_it_means(invoke: Invoke, folder: Path, content: Content, settings: Settings) -> None:
    result = invoke("validate", _write(folder, content))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "served by vLLM with --max-lora-rank 8, whichever job wins" in text
    # 32 training rows: 16 steps at 4 rows, 8 at 8 rows
    for fact in (
        "jobs 8, every combination",
        "steps 8 to 16 a job",
        "512 rows",
        "q_proj (2)",
        "ready to tune",
        "alto tune",
    ):
        assert fact in text, fact
    assert not (settings.home / "mlflow.db").exists()


def test_json_of_a_real_process_is_one_object_and_nothing_else(folder: Path, content: Content) -> None:
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "validate", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "ALTO_HOME": str(folder / "alto"), "ALTO_DEVICE": "cpu"}
    done = subprocess.run(
        [*command, _write(folder, content)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["num_jobs"], plan["steps_min"], plan["steps_max"], plan["num_samples"]) == (8, 8, 16, 512)
    assert len(set(plan["job_ids"])) == 8
    assert plan["target_modules"]["q_proj"] == 2


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"budgett": {}}, 2, "budgett"),
        ({"budget": {"epochs": 2, "steps": 3}}, 2, "budget"),
        ({"search_space": {"learning_rate": 1e-3, "lora_rank": 64}}, 2, "search_space.lora_rank"),
        ({"early_exit": {"overrides": {"no_such": 1}}}, 2, "early_exit.overrides.no_such"),
        ({"data": {"source": "missing.jsonl"}}, 3, "missing.jsonl"),
        ({"data": {"source": "train.jsonl", "columns": {"prompt": "nothing"}}}, 3, "data.columns"),
        ({"model": {"name": "./no-model"}}, 4, "no-model"),
        ({"search_space": {"learning_rate": 1e-3, "lora_rank": 2, "target_modules": ["z_proj"]}}, 4, "z_proj"),
    ],
)
def test_what_is_wrong_is_named_with_its_exit_code(
    invoke: Invoke, folder: Path, content: Content, change: Content, code: int, named: str
) -> None:
    result = invoke("validate", _write(folder, {**content, **change}), "--json")
    assert result.exit_code == code, result.output
    assert named in result.stderr
    error = json.loads(result.stdout)
    assert error["exit_code"] == code and error["event"] == "error"


def test_unusable_rows_are_counted_with_an_example(invoke: Invoke, folder: Path, content: Content) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1 plus 1 is", "completion": ""}\n{"prompt": 3, "completion": " 2"}\nnot json\n')
    output = invoke("validate", _write(folder, content)).stdout
    for reason in ("empty answer", "field is not text", "broken line", "train.jsonl:41", "train.jsonl:43"):
        assert reason in output, reason
