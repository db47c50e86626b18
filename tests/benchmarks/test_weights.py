"""The questions about the weight plan."""

from functools import partial

import pytest
import torch

from autocast_backend import weight_cache_info
from benchmarks import decode, threshold, training, weights
from benchmarks.answer import Answer
from benchmarks.harness import compare
from benchmarks.memory import peak_bytes
from benchmarks.models import GPT
from benchmarks.training import CastCounter


def test_the_counter_sees_casts_of_weights_only():
    from autocast_backend import multi_cast

    weights = [torch.ones(3), torch.ones(4)]
    with CastCounter(weights) as counter:
        torch.ones(3).bfloat16()
        weights[0].double()
        assert counter.casts == 0
        weights[0].bfloat16()
        multi_cast([*weights, torch.ones(2)], torch.float16)
        multi_cast(weights, torch.float16, out=[torch.ones_like(w).half() for w in weights])
    assert counter.casts == 1 + 2 + 2


@pytest.mark.slow
def test_casts_of_a_training_step():
    """As the README predicts: by micro-batch, by step, by context."""
    torch.manual_seed(0)
    model = GPT(1, width=32, heads=2)
    batches = list(torch.randint(1024, (2, 1, 9)))
    each = training.count(model, batches, "each")
    one = training.count(model, batches, "one")
    n = each["ours, version"]
    assert n == 9
    assert [each[k] for k in ("stock", "eager", "ours, scope", "ours, off")] == [2 * n] * 4
    assert [one[k] for k in ("stock", "ours, off")] == [2 * n] * 2
    assert [one[k] for k in ("eager", "ours, scope", "ours, version")] == [n] * 3


def test_a_peak_is_what_is_held_at_one_time():
    def function():
        torch.empty(1000, dtype=torch.uint8)
        kept = torch.empty(3000, dtype=torch.uint8)
        torch.empty(2000, dtype=torch.uint8)
        return kept

    assert 5000 <= peak_bytes(function, "cpu") < 6000


def test_garbage_is_not_part_of_what_was_there_before(monkeypatch):
    """On CUDA, where the allocator is asked, with an allocator that counts by hand."""
    held, peak = [300], [300]

    def collect():
        held[0] -= 200

    def step():
        peak[0] = max(peak[0], held[0] + 50)

    monkeypatch.setattr("gc.collect", collect)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: peak.__setitem__(0, held[0]))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: held[0])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: peak[0])
    assert peak_bytes(lambda: (collect() if held[0] > 100 else None, step()), "cuda") == 50


def test_decode_is_judged_by_the_limit_or_by_the_noise():
    samples = {
        "stock": [2.0],
        "control": [2.02],
        "limit": [1.0],
        "ours, scope": [1.2],
        "ours, version": [1.05],
    }
    rows = compare(samples, baseline="stock")
    verdicts = []
    for form in decode.FORMS:
        answer = Answer(question="decode", settings={})
        decode.judge(form, rows, answer)
        verdicts.append([target.verdict for target in answer.targets])
    assert verdicts == [["missed", "met", "met", "met"], ["met", "met"]]


def test_the_threshold_is_judged_by_both_places_of_a_cast(tmp_path, monkeypatch):
    monkeypatch.setattr(threshold, "USES", (1, 2))
    monkeypatch.setattr(threshold, "QUICK_SIZES", (1, 32))
    tiny = GPT(1, width=32, heads=2), 1024
    monkeypatch.setattr(threshold, "model_of", lambda quick: tiny)
    compiled = threshold.compiled
    monkeypatch.setattr(threshold, "compiled", partial(compiled, inner="aot_eager"))
    before = weight_cache_info().casts
    assert threshold.main(["--quick", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert weight_cache_info().casts > before  # outside of a graph, also with one call in a context
    answer = Answer.load(tmp_path / "threshold.json")
    assert [*answer.sections] == [
        "1 calls in a context",
        "2 calls in a context",
        "one call in a context, a cast of 1 MiB",
        "one call in a context, a cast of 32 MiB",
    ]
    assert len(answer.targets) == 2


@pytest.mark.slow
def test_a_model_compiled_whole_and_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "LAYERS_IN_BLOCK", 1)
    arguments = ["--quick", "--rounds", "1", "--out", str(tmp_path)]
    casts = {}

    def measure(form, mode, **settings):
        before = weight_cache_info().casts
        measured = weights_measure(form, mode, **settings)
        casts[form, mode] = weight_cache_info().casts - before
        return measured

    weights_measure = weights.measure
    monkeypatch.setattr(weights, "measure", measure)
    assert weights.main(arguments, inner="aot_eager") == 0
    for form in weights.FORMS:  # of 8 weights, in 4 calls, by the candidates "scope" and "version"
        found = [casts[form, mode] for mode in weights.MODES]
        assert found == [8 + 8, 0 + 8, 4 * 8 + 8]
    sections = Answer.load(tmp_path / "weights.json").sections
    assert [*sections] == [f"{form}, {mode}" for form in weights.FORMS for mode in weights.MODES]
    assert {section["weights"] for section in sections.values()} == {8}


def test_blocks_of_one_candidate_share_their_code_and_no_other_has_it():
    torch.compiler.reset()
    model, x = weights.model_of(2, "cpu"), torch.ones(1, weights.WIDTH)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for name in ("stock", "ours"):
        own = weights.compiled(model, "block by block", name, backend="aot_eager")
        with torch.no_grad():  # with gradients, the first block alone gets an input without
            assert torch.equal(own(x), model(x))
        assert len({block.forward.__code__ for block in own}) == 1
    assert counters["unique_graphs"] == 2
