"""Answers: those of transformers and PEFT, whatever shares the batch."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from alto_core.config import ModelSection
from alto_core.engine import decoding
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.generation import generate
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.sampling import Sampling, drawn

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def draw_prompts(count: int, vocabulary: int, longest: int = 9) -> list[tuple[int, ...]]:
    draw = random.Random(5)
    return [tuple(draw.randrange(3, vocabulary) for _ in range(draw.randint(1, longest))) for _ in range(count)]


def greedy(model: Any, prompt: tuple[int, ...], count: int, stop: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Token by token, each time the whole sequence anew: no cache, no padding, no `generate`."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in stop:
            break
        ids.append(token)
    return tuple(ids[len(prompt) :])


def admit_and_train(tiny: Any, engine: Any, job: Any) -> None:
    engine.admit(job, tiny.budget())
    for _ in range(3):
        tiny.step(engine, {job.job_id: tiny.rows(3)})


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "gpt2"])
def test_answers_of_many_adapters_in_one_batch_equal_each_alone(tiny: Any, family: str, tmp_path: Path) -> None:
    jobs = [tiny.job(family, lora_rank=rank, learning_rate=3e-2) for rank in (2, 5)]
    prompts = draw_prompts(4, tiny.vocabulary)
    with tiny.engine(family) as engine:
        for job in jobs:
            admit_and_train(tiny, engine, job)
            engine.export(job.job_id, tmp_path / job.job_id)
        names = [None, jobs[0].job_id, jobs[1].job_id]
        asked = [(name, prompt) for prompt in prompts for name in names]
        answers = [
            engine.generate(asked, max_new_tokens=6, stop_token_ids=(), max_rows=max_rows) for max_rows in (100, 5)
        ]
    assert answers[0] == answers[1]
    models = {None: tiny.plain_model(family)}
    for job in jobs:
        models[job.job_id] = peft.PeftModel.from_pretrained(tiny.plain_model(family), tmp_path / job.job_id).eval()
    assert answers[0] == [greedy(models[name], prompt, 6) for name, prompt in asked]
    by_name = [
        [answer for (asked_name, _), answer in zip(asked, answers[0], strict=True) if asked_name == n] for n in names
    ]
    assert by_name[0] != by_name[1] != by_name[2]


@pytest.mark.parametrize(
    ("family", "sampling"), [("llama", None), ("gemma2", Sampling(temperature=0.8, top_p=0.9, seed=3))], ids=str
)
def test_every_row_gets_the_tokens_that_it_gets_alone(tiny: Any, family: str, sampling: Sampling | None) -> None:
    # Rows leave at stop tokens, others take their slots and pages, and adapters come and go with their rows.
    jobs = [tiny.job(family, lora_rank=rank, learning_rate=3e-2) for rank in (2, 5, 9)]
    names = (None, *(job.job_id for job in jobs))
    asked = [(name, prompt) for prompt in draw_prompts(8, tiny.vocabulary, longest=40) for name in names]
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_token_ids": (5, 9, 11, 30, 41, 52), "sampling": sampling}
    with tiny.engine(family) as engine:
        for job in jobs:
            admit_and_train(tiny, engine, job)
        expected = {pair: engine.generate([pair], max_rows=1, **options)[0] for pair in asked}
        assert len({len(answer) for answer in expected.values()}) > 3
        compositions = {
            "all at once": (asked, None),
            "the other way round, seven at a time": (asked[::-1], 7),
            **{f"{name} alone, two at a time": ([pair for pair in asked if pair[0] == name], 2) for name in names},
            "half of the prompts, without the second adapter": ([p for p in asked[::2] if p[0] != names[2]], 5),
        }
        for what, (chosen, max_rows) in compositions.items():
            answers = engine.generate(chosen, max_rows=max_rows, **options)
            assert answers == [expected[pair] for pair in chosen], what


def test_answering_keeps_no_memory(tiny: Any, living_tensor_bytes: Callable[[], int]) -> None:
    with tiny.engine() as engine:
        job = tiny.job()
        admit_and_train(tiny, engine, job)
        held = []
        for _ in range(3):
            asked = [(name, prompt) for prompt in draw_prompts(9, tiny.vocabulary) for name in (None, job.job_id)]
            engine.generate(asked, max_new_tokens=5, stop_token_ids=(5, 9), max_rows=4)
            held.append(living_tensor_bytes())
    assert held[0] == held[1] == held[2]


def test_answer_ends_before_any_stop_token(tiny: Any) -> None:
    prompts = draw_prompts(6, tiny.vocabulary)
    plain = tiny.plain_model()
    free = [greedy(plain, prompt, 8) for prompt in prompts]
    stop = (free[0][3], free[1][1])
    with tiny.engine() as engine:
        asked = [(None, prompt) for prompt in prompts]
        answers = engine.generate(asked, max_new_tokens=8, stop_token_ids=stop, max_rows=4)
    assert answers == [greedy(plain, prompt, 8, stop) for prompt in prompts]
    assert len(answers[1]) <= 1


def test_rows_that_finish_make_room_and_answers_stay_the_same(tiny: Any) -> None:
    # Every batch is put together anew again and again: rows leave at other times, prompts of other lengths come in.
    prompts = draw_prompts(13, tiny.vocabulary)
    plain = tiny.plain_model()
    free = [greedy(plain, prompt, 9) for prompt in prompts]
    stop = tuple({answer[i % 6] for i, answer in enumerate(free)})
    expected = [greedy(plain, prompt, 9, stop) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 3
    with tiny.engine() as engine:
        for max_rows in (1, 2, 3, 7, None):
            asked = [(None, prompt) for prompt in prompts]
            answers = engine.generate(asked, max_new_tokens=9, stop_token_ids=stop, max_rows=max_rows)
            assert answers == expected, max_rows


def test_drawn_answers_depend_on_seed_and_prompt_alone(tiny: Any) -> None:
    prompts = draw_prompts(6, tiny.vocabulary)
    asked = [(None, prompt) for prompt in prompts]
    options = {"max_new_tokens": 6, "stop_token_ids": (2,)}
    with tiny.engine() as engine:
        first = engine.generate(asked, sampling=Sampling(seed=3), **options)
        alone = [
            engine.generate([pair], sampling=Sampling(seed=3), max_rows=1, **options)[0] for pair in reversed(asked)
        ]
        other = engine.generate(asked, sampling=Sampling(seed=4), **options)
        nearly_greedy = engine.generate(asked, sampling=Sampling(temperature=1e-4), **options)
        narrow = engine.generate(asked, sampling=Sampling(top_p=1e-6, seed=3), **options)
        greedily = engine.generate(asked, **options)
    assert alone == first[::-1]
    assert first != other
    assert nearly_greedy == narrow == greedily


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.05, 0.25]])).expand(4000, 4)
    draws = (torch.arange(4000) + 0.5) / 4000
    for top_p, expected in ((1.0, (0.1, 0.6, 0.05, 0.25)), (0.7, (0.0, 0.6 / 0.85, 0.0, 0.25 / 0.85))):
        counts = torch.bincount(drawn(logits, draws, Sampling(top_p=top_p)), minlength=4) / 4000
        assert counts.tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected temperature above 0"):
        Sampling(**wrong)


def test_models_own_sampling_settings_do_not_enter(tiny: Any, tmp_path: Path) -> None:
    # A repetition penalty in the model's folder would change greedy answers without a word.
    folder = tmp_path / "talkative"
    shutil.copytree(tiny.folder(), folder)
    settings = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "suppress_tokens": [5, 6, 7]}
    (folder / "generation_config.json").write_text(json.dumps({**settings, "max_new_tokens": 2}))
    prompt = (4, 4, 9)
    with Engine(
        load_backbone(ModelSection(name=str(folder)), "cpu"), target_modules=["q_proj"], num_slots=1, rank_rows=1
    ) as engine:
        answers = engine.generate([(None, prompt)], max_new_tokens=7, stop_token_ids=(), max_rows=1)
    assert answers == [greedy(tiny.plain_model(), prompt, 7)]


def test_answers_end_where_the_models_positions_end(tiny: Any) -> None:
    # T8: GPT-2 learned 64 positions. Other prompts keep their full answers.
    long, full, short = tuple(range(3, 63)), tuple(range(3, 67)), (5, 6)
    with tiny.engine("gpt2") as engine:
        answers = engine.generate(
            [(None, long), (None, full), (None, short)],
            max_new_tokens=10,
            stop_token_ids=(),
            max_rows=8,
        )
    assert [len(answer) for answer in answers] == [4, 0, 10]


class RunAgain:
    """Stands in for a pool of CUDA graphs where there is no GPU: to replay is to run again."""

    sizes: list[int]

    def __init__(self, device: torch.device):
        self.replay: Callable[[], object] = lambda: None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    def capture(self, run: Callable[[], object]) -> tuple[RunAgain, None]:
        graph = RunAgain(torch.device("cpu"))
        graph.replay = run
        self.sizes.append(1)
        return graph, None

    def forget(self, graph: RunAgain) -> None:
        self.sizes.append(-1)


@pytest.mark.parametrize(("flops", "captures"), [(0.0, 3), (1e30, 1)])
def test_steps_of_fixed_size_serve_rows_that_come_and_go(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, flops: float, captures: int
) -> None:
    # 150 rows at most: 192 with those that fill up. As they leave, smaller steps are worth it at once, or never.
    prompts = draw_prompts(260, tiny.vocabulary)
    asked = [(None, prompt) for prompt in prompts]
    backbone = tiny.backbone()
    options = {"max_new_tokens": 12, "stop_token_ids": (5, 9, 11, 30), "sampling": Sampling(seed=1)}
    expected = generate(backbone, LoraRouting(), asked, max_rows=40, **options)
    monkeypatch.setattr(RunAgain, "sizes", [], raising=False)
    monkeypatch.setattr(decoding, "GraphPool", RunAgain)
    monkeypatch.setattr(decoding, "CAPTURE_FLOPS", flops)
    assert generate(backbone, LoraRouting(), asked, max_rows=150, capture=True, **options) == expected
    assert RunAgain.sizes == [1] * captures + [-1] * captures


def test_an_adapter_that_is_not_finite_leaves_the_others_alone(tiny: Any) -> None:
    # Its rows leave values that are no numbers in pages that other rows take after them.
    jobs = [tiny.job(lora_rank=rank) for rank in (2, 5)]
    prompts = draw_prompts(9, tiny.vocabulary)
    answers = []
    for damage in (False, True):
        with tiny.engine() as engine:
            for job in jobs:
                admit_and_train(tiny, engine, job)
            if damage:
                engine._of(jobs[0].job_id).block.params_rW.fill_(float("nan"))
            asked = [(job.job_id, prompt) for prompt in prompts for job in jobs]
            given = engine.generate(asked, max_new_tokens=6, stop_token_ids=(), max_rows=4)
            answers.append(given[1::2])
    assert answers[0] == answers[1]


def test_training_goes_on_as_if_nothing_had_been_generated(tiny: Any) -> None:
    job, rows = tiny.job(), tiny.rows(3)
    losses = []
    for generates in (False, True):
        with tiny.engine() as engine:
            admit_and_train(tiny, engine, job)
            if generates:
                engine.generate([(job.job_id, (5, 6))], max_new_tokens=2, stop_token_ids=(), max_rows=1)
            losses.append(
                (tiny.step(engine, {job.job_id: rows})[0].train_loss, engine.evaluate([""], rows, max_tokens=99))
            )
    assert losses[0] == losses[1]


def test_empty_prompts_are_refused_and_no_prompts_give_no_answers(tiny: Any) -> None:
    with tiny.engine() as engine:
        options = {"max_new_tokens": 2, "stop_token_ids": (), "max_rows": 1}
        assert engine.generate([], **options) == []
        with pytest.raises(ValueError, match="at least one token"):
            engine.generate([(None, ())], **options)
