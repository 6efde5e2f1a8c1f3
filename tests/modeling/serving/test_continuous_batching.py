"""Transformers' continuous batching with composed heads: the tokens of every request are those of `generate` alone."""

import copy
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.models import SMALL, make_model
from transformers import BatchEncoding, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as transformers_cache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from dynattn import DCPythiaConfig, DCPythiaForCausalLM, RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.ops.dcmha.chunked.attention import dcmha_chunked
from dynattn.modeling.serving import cache_size, paged_attention, requirements
from dynattn.modeling.serving.cache_size import with_sizes
from dynattn.modeling.serving.continuous_batching import ComposedBatchingManager
from dynattn.modeling.serving.paged_attention import Span
from dynattn.modeling.serving.requirements import SHARED, SHARED_IN_SAMPLING, UNSERVED, check_joins
from dynattn.modeling.serving.served_model import ServedModel, find_requests

FULL = {"sliding_window": None, "layer_types": None}
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
# Fields of `GenerationConfig` that matter only to beams, to assistants, to caches that are not paged, or to the output
# of `generate`, and tokens that no prompt gets.
WITHOUT_EFFECT = {
    *("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups", "constraints", "low_memory"),
    *("assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "is_assistant"),
    *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind"),
    *("speculation_type", "cache_config", "cache_implementation", "max_cache_len", "use_cache", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "transformers_version"),
    *("bos_token_id", "decoder_start_token_id", "pad_token_id"),
}
SETTINGS: dict[str, Any] = {"page_size": 8, "num_blocks": 40, "max_batch_tokens": 64}


def make_pythia(**overrides: Any) -> DCPythiaForCausalLM:
    torch.manual_seed(1)
    fields = {**SMALL, "head_dim": 8, "num_key_value_heads": 6, **overrides}
    return DCPythiaForCausalLM(DCPythiaConfig(**fields)).eval()


MODELS: dict[str, Any] = {
    "dcformer": lambda: make_model(),
    "dcformer-full": lambda: make_model(**FULL),
    "dcformer-eager": lambda: make_model(attn_implementation="eager"),
    "dcformer-float64": lambda: make_model().double(),
    "dcformer-query-wise": lambda: make_model(compose_key_wise=False),
    "dcformer-static": lambda: make_model(compose_key_wise=False, compose_query_wise=False, compose_static=True),
    "dcformer-odd-sizes": lambda: make_model(num_attention_heads=5, num_key_value_heads=1, head_dim=6),
    "dcformer-post-groups": lambda: make_model(compose_pre=False, compose_groups=3, compose_static=True),
    "dcformer-alibi": lambda: make_model(position_scheme="alibi", position_gain="bucket", compose_position_bias=True),
    "dcformer-t5-eager": lambda: make_model(position_scheme="t5", attn_implementation="eager"),
    "dcformer-learned": lambda: make_model(position_scheme="learned", max_position_embeddings=128),
    "plain-alibi": lambda: make_model(position_scheme="alibi", compose_pre=False, compose_post=False),
    "plain-chunked": lambda: make_model(compose_pre=False, compose_post=False, attn_implementation="chunked"),
    "dcpythia": make_pythia,
}


def random_prompts(lengths: list[int], seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, SMALL["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def alone(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """What `generate` gives for one prompt."""
    output = model.generate(torch.tensor([prompt]), generation_config=GREEDY, max_new_tokens=new)
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def assert_same_tokens(model: PreTrainedModel, prompt: list[int], found: list[int]) -> None:
    """Where tokens part from those of `generate`, float64 must see a tie of the two, but for float32's rounding."""
    expected = alone(model, prompt, len(found))
    if found == expected:
        return
    place = next(index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    exact = make_like(model)(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    gap = (exact[expected[place]] - exact[found[place]]).abs()
    assert gap <= 1e-5 * exact.abs().max(), f"token {place} after {len(prompt)}: {found[place]}, not {expected[place]}"


def make_like(model: PreTrainedModel) -> PreTrainedModel:
    """The same model in float64."""
    exact = type(model)(model.config).eval().double()
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    return exact


@contextmanager
def manager_of(model: PreTrainedModel, **settings: Any) -> Iterator[ComposedBatchingManager]:
    configuration = ContinuousBatchingConfig(**{**SETTINGS, **settings})
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=configuration) as manager:
        yield manager


def results(manager: ContinuousBatchingManager, count: int, seconds: float = 120) -> dict[str, Any]:
    """The finished results of `count` requests."""
    finished: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while len(finished) < count and time.monotonic() < deadline:
        result = manager.get_result(timeout=0.2)
        if result is not None and result.is_finished():
            finished[result.request_id] = result
    assert len(finished) == count, "the manager gave no answer"
    return finished


FAST = ("dcformer", "dcformer-float64", "dcformer-alibi", "dcpythia")


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[] if name in FAST else [pytest.mark.slow], id=name) for name, make in MODELS.items()],
)
def test_a_batch_gives_the_tokens_of_each_request_alone(make: Any) -> None:
    """With prompts longer than a window, than a batch (which then come in chunks) and of a single token."""
    model, prompts = make(), random_prompts([3, 37, 70, 1, 18])
    outputs = model.generate_batch(prompts, GREEDY, ContinuousBatchingConfig(**SETTINGS))
    assert [output.prompt_ids for output in outputs.values()] == prompts
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.error is None and len(output.generated_tokens) == 12
        assert_same_tokens(model, prompt, output.generated_tokens)


def test_steps_on_a_cpu_read_rows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows are gathered for requests that decode, here or when the new ones are written."""
    steps = []

    def recorded(*args: Any, **options: Any) -> Any:
        output = paged_attention_op(*args, **options)
        steps.append(output)
        return output

    paged_attention_op = paged_attention.PAGED_DECODING[dcmha_chunked]
    monkeypatch.setitem(paged_attention.PAGED_DECODING, dcmha_chunked, recorded)
    monkeypatch.setattr(paged_attention.RequestRows, "step_index", property(lambda self: pytest.fail("gathered")))
    monkeypatch.setattr(torch, "index_select", lambda *_: pytest.fail("read back"))
    make_model().generate_batch(random_prompts([5, 9]), GREEDY, ContinuousBatchingConfig(**SETTINGS))
    assert len(steps) >= 11 * SMALL["num_hidden_layers"] and all(step is not None for step in steps)


def test_requests_that_arrive_later_join_and_share_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, matches = make_model(**FULL), []
    search = transformers_cache.PagedAttentionCache.search_prefix_match

    def recorded(*args: Any) -> int:
        matches.append(search(*args))
        return matches[-1]

    monkeypatch.setattr(transformers_cache.PagedAttentionCache, "search_prefix_match", recorded)
    first, *rest = random_prompts([40, 5, 3])
    with manager_of(model) as manager:
        prompts = {manager.add_request(first): first}
        finished = results(manager, 1)
        for tail in rest:
            prompts[manager.add_request(first[:30] + tail)] = first[:30] + tail
        finished |= results(manager, 2)
    assert max(matches) == 24  # the full pages of 30 tokens
    for name, prompt in prompts.items():
        assert_same_tokens(model, prompt, finished[name].generated_tokens)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow, id="sliding"), pytest.param(FULL, id="full")]
)
def test_requests_that_are_preempted_go_on_where_they_were(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache too small for all of them: some give up their rows, and make them again later."""
    model, preempted = make_model(**options), []
    offload = OffloadingManager.offload_requests

    def recorded(self: OffloadingManager) -> Any:
        preempted.append(offload(self))
        return preempted[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", recorded)
    prompts = random_prompts([20, 33, 27, 30, 25, 31])
    settings = ContinuousBatchingConfig(**{**SETTINGS, "num_blocks": 14})
    outputs = model.generate_batch(prompts, GREEDY, settings, max_new_tokens=30)
    assert any(preempted)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert_same_tokens(model, prompt, output.generated_tokens)


def test_several_answers_to_one_prompt_are_forks_of_its_rows() -> None:
    model, prompts = make_model(), random_prompts([19, 30])
    several = copy.copy(GREEDY)
    several.num_return_sequences = 3
    outputs = model.generate_batch(prompts, several, ContinuousBatchingConfig(**SETTINGS))
    assert len(outputs) == 6
    for index, output in enumerate(outputs.values()):
        assert_same_tokens(model, prompts[index // 3], output.generated_tokens)


def test_tokens_stream_and_generate_still_works_meanwhile() -> None:
    model, (prompt, other) = make_model(), random_prompts([11, 6])
    expected = alone(model, other, 5)
    with manager_of(model) as manager:
        name = manager.add_request(prompt, streaming=True)
        found = {"other": alone(model, other, 5)}
        parts = [part.generated_tokens for part in manager.request_id_iter(name)]
    assert found["other"] == expected
    assert [len(part) for part in parts] == list(range(1, 13))
    assert_same_tokens(model, prompt, parts[-1])


@pytest.mark.parametrize("bias", [{(5000,): 5.0}, {(-1,): 5.0}, {5: 5.0}])
def test_a_bias_of_no_token_is_refused_and_keeps_no_manager(bias: dict[Any, float]) -> None:
    model, prompts = make_model(), random_prompts([11])
    biased = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    biased.sequence_bias = bias
    with pytest.raises(ValueError, match="is no sequence of tokens of the vocabulary of 97"):
        model.generate_batch(prompts, biased, persistent_manager=True)
    assert len(model.generate_batch(prompts, GREEDY, ContinuousBatchingConfig(**SETTINGS))) == 1


def test_a_persistent_manager_serves_again_and_then_goes() -> None:
    model, prompts = make_model(), random_prompts([11, 6])
    for _ in range(2):
        outputs = model.generate_batch(prompts, GREEDY, ContinuousBatchingConfig(**SETTINGS), persistent_manager=True)
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            assert_same_tokens(model, prompt, output.generated_tokens)
    assert len(model.generate_batch(prompts, max_new_tokens=2)) == 2, "by the settings of the manager that is kept"
    manager = model._cached_continuous_batching_manager
    assert model.init_continuous_batching() is manager
    sampled = GenerationConfig(max_new_tokens=4, do_sample=True, num_return_sequences=2, pad_token_id=0)
    for other, name in [
        (sampled, "do_sample"),
        (GenerationConfig(**{**GREEDY.to_diff_dict(), "eos_token_id": 3}), "eos_token_id"),
        (GenerationConfig(**{**GREEDY.to_diff_dict(), "repetition_penalty": 1.7}), "repetition_penalty"),
    ]:
        with pytest.raises(ValueError, match=name):
            model.generate_batch(prompts, other, persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(GREEDY) is not manager


def test_prompts_without_settings_have_those_of_the_manager_that_is_kept() -> None:
    model, prompts, several = make_model(), random_prompts([3, 2]), copy.copy(GREEDY)
    several.num_return_sequences = 3
    for given in (several, None, None):
        settings = ContinuousBatchingConfig(**SETTINGS)
        outputs = model.generate_batch(prompts, given, settings, max_new_tokens=2, persistent_manager=True)
        assert [output.prompt_ids for output in outputs.values()] == [prompts[0]] * 3 + [prompts[1]] * 3
    with pytest.raises(ValueError, match=r"501 tokens and 12 new ones needs more than max_position_embeddings \(512\)"):
        model.generate_batch([[1] * 501], persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()


def test_a_name_is_taken_until_its_request_has_ended() -> None:
    """Two requests of one name would share rows, and Transformers would end the thread that computes all requests."""
    model, (prompt, other) = make_model(), random_prompts([11, 6])
    manager = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(**SETTINGS))
    manager.add_request(prompt, "mine", max_new_tokens=150, streaming=True)
    with pytest.raises(ValueError, match="request_id='mine' is the name of a request that has not ended"):
        manager.add_request(other, "mine")  # while the first one waits for the start
    manager.start()
    try:
        assert len(manager.get_result(timeout=120).generated_tokens) < 150  # it is computed now
        with pytest.raises(ValueError, match="has not ended"):
            manager.add_request(other, "mine")
        assert len(results(manager, 1)["mine"].generated_tokens) == 150
        manager.add_request(other, "mine")
        assert_same_tokens(model, other, results(manager, 1)["mine"].generated_tokens)
    finally:
        manager.stop(block=True)


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    model, (prompt, other) = make_model(), random_prompts([11, 6])
    with manager_of(model) as manager:
        cancelled = manager.add_request(other, max_new_tokens=400)
        name = manager.add_request(prompt)
        manager.cancel_request(cancelled)
        finished = results(manager, 1)
    assert_same_tokens(model, prompt, finished[name].generated_tokens)


def test_what_handles_the_results_of_a_cancelled_request_is_removed() -> None:
    """Servers keep one for each request; clients that leave cancel theirs."""
    model, (prompt, other) = make_model(), random_prompts([11, 6])
    with manager_of(model) as manager:
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda *_: None)
        manager.output_router.result_handlers["gone"] = (print, loop)
        manager.add_request(other, request_id="gone", max_new_tokens=400, streaming=True)
        manager.cancel_request("gone")
        manager.add_request(prompt)
        results(manager, 1)
        assert not manager.output_router.result_handlers


@pytest.mark.parametrize(("options", "tokens"), [({}, 160), (FULL, 64)], ids=["sliding", "full"])
def test_what_the_cache_has_no_room_for_is_refused_and_the_others_are_served(
    options: dict[str, Any], tokens: int
) -> None:
    """Eight pages for each layer. Transformers would end the thread, and with it all other requests."""
    model, (prompt, other) = make_model(**options), random_prompts([20, 6])
    with manager_of(model, num_blocks=8) as manager:
        names = {manager.add_request(other): other}
        most = tokens - 20 + 1  # the last one is not stored
        with pytest.raises(ValueError, match=f"20 tokens and {most + 1} new ones does not fit.* at most {most} new"):
            manager.add_request(prompt, max_new_tokens=most + 1)
        with pytest.raises(ValueError, match=r"does not fit into the paged cache; shorten the prompt, or give the"):
            manager.add_request([1] * (tokens + 1), max_new_tokens=1)
        names[manager.add_request(prompt, max_new_tokens=most)] = prompt
        finished = results(manager, 2)
        assert manager.is_running()
    for name, own in names.items():
        assert_same_tokens(model, own, finished[name].generated_tokens)
    assert max(len(result.generated_tokens) for result in finished.values()) == most


def test_requests_are_checked_against_the_cache_also_before_the_start_and_not_after_the_end() -> None:
    model, (prompt,) = make_model(**FULL), random_prompts([20])
    endless = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    manager = model.init_continuous_batching(endless, ContinuousBatchingConfig(**{**SETTINGS, "num_blocks": 8}))
    with pytest.raises(ValueError, match="does not fit into the paged cache"):
        manager.add_request(prompt, max_new_tokens=46)
    name = manager.add_request(prompt)  # which ends where the cache does
    manager.start()
    assert len(results(manager, 1)[name].generated_tokens) == 45
    manager.stop()
    assert manager.add_request(prompt) is None and manager.batch_processor is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_generate_batch_raises_what_it_would_only_log(is_kept: bool) -> None:
    """Transformers' method logs errors of requests, and returns no answers."""
    model, (prompt, other) = make_model(**FULL), random_prompts([20, 6])
    few = {"continuous_batching_config": ContinuousBatchingConfig(**{**SETTINGS, "num_blocks": 2})}
    if is_kept:
        assert model.generate_batch([[1, 2, 3]], GREEDY, persistent_manager=True, max_new_tokens=2, **few)
    with pytest.raises(ValueError, match="20 tokens and 4 new ones does not fit into the paged cache"):
        model.generate_batch([other, prompt], GREEDY, max_new_tokens=4, **few)


def test_generate_batch_raises_for_a_length_of_prompt_and_answer_that_does_not_fit() -> None:
    few = ContinuousBatchingConfig(**{**SETTINGS, "num_blocks": 3})
    long = GenerationConfig(max_length=30, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(ValueError, match=r"20 tokens and 10 new ones does not fit.*at most 5 new tokens"):
        make_model(**FULL).generate_batch(random_prompts([6, 20]), long, few)


@pytest.mark.parametrize(
    "inputs",
    [
        [1, 2],
        ["ab"],
        [["a", "b"]],
        [[None]],
        {"input_ids": [[1]]},
        [BatchEncoding({"input_ids": [1, 2]})],
        torch.tensor([[1]]),
        [torch.tensor([[1]])],
        [[[1]]],
        [[[1], [1, 2]]],
        "ab",
    ],
    ids=str,
)
def test_generate_batch_says_what_prompts_are(inputs: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a list of prompts, each a list of token ids, as in \[\[1, 2, 3\]\]"):
        make_model().generate_batch(inputs, GREEDY)


def test_threads_that_add_the_first_requests_share_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_model(**FULL).init_continuous_batching(GREEDY, ContinuousBatchingConfig(**SETTINGS))
    create, made = manager._create_batch_processor, []

    def create_slowly() -> Any:
        made.append(threading.get_ident())
        time.sleep(0.2)
        return create()

    monkeypatch.setattr(manager, "_create_batch_processor", create_slowly)
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda name: manager.add_request([5, 6], name, max_new_tokens=2), "ab"))
    assert len(made) == 1


def test_an_answer_without_a_limit_ends_with_the_positions() -> None:
    model, (prompt,) = make_model(max_position_embeddings=40), random_prompts([11])
    endless = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    (output,) = model.generate_batch([prompt], endless, ContinuousBatchingConfig(**SETTINGS)).values()
    assert len(output.generated_tokens) == 29
    assert endless.eos_token_id is None


def test_what_a_request_leaves_unset_is_that_of_the_models_configuration() -> None:
    """An end of text, a length of prompt and answer, and a number of answers, as in `generate`."""
    model, (prompt,), settings = make_model(**FULL), random_prompts([11]), ContinuousBatchingConfig(**SETTINGS)
    expected = alone(model, prompt, 5)
    greedy = GenerationConfig(do_sample=False, pad_token_id=0)
    model.generation_config.eos_token_id, model.generation_config.max_length = expected[2], 40
    (output,) = model.generate_batch([prompt], greedy, settings).values()
    assert output.generated_tokens == expected[: expected.index(expected[2]) + 1]
    model.generation_config.eos_token_id, model.generation_config.max_length = None, 14
    model.config.eos_token_id = expected[1]  # which `generate` does not read either
    model.generation_config.num_return_sequences = 2
    outputs = model.generate_batch([prompt], greedy, settings).values()
    assert [output.generated_tokens for output in outputs] == [expected[:3]] * 2
    assert greedy.max_length is None and greedy.num_return_sequences is None


def test_a_prompt_that_leaves_no_token_within_the_length_is_refused() -> None:
    model, short = make_model(), GenerationConfig(max_length=8, do_sample=False)
    with pytest.raises(ValueError, match="a request of 8 tokens leaves no new one within max_length=8; shorten"):
        model.generate_batch([[1] * 8], short)
    manager = model.init_continuous_batching(short, ContinuousBatchingConfig(**SETTINGS))
    with pytest.raises(ValueError, match="leaves no new one within max_length=8"):
        manager.add_request([1] * 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("stop_strings", ["x"]),
        ("repetition_penalty", 5.0),
        ("prompt_lookup_num_tokens", 3),
        ("guidance_scale", 1.5),
        ("forced_eos_token_id", 3),
        ("bad_words_ids", [[5]]),
    ],
)
def test_what_only_generate_does_is_refused_also_where_the_model_asks_for_it(name: str, value: Any) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=f"continuous batching does not serve {name}="):
        model.init_continuous_batching(GenerationConfig(**{name: value}))
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"continuous batching does not serve {name}="):
        model.generate_batch([[1]], GREEDY)


def test_a_bias_of_several_tokens_is_refused_and_one_of_single_tokens_is_served() -> None:
    model, prompt = make_model(), [5, 0, 42]
    first = model.generate_batch([prompt], GREEDY)["req_0"].generated_tokens[0]
    for bias in ({(first,): -100.0, (0,): -1.0}, [[[first], -100.0], [[0], -1.0]]):
        biased = GenerationConfig(**{**GREEDY.to_diff_dict(), "sequence_bias": bias})
        given = {"attention_mask": torch.ones(1, 3, dtype=torch.long), "generation_config": biased}
        expected = model.generate(torch.tensor([prompt]), **given)[0, 3:]
        assert model.generate_batch([prompt], biased)["req_0"].generated_tokens == expected.tolist()
    for bias in ({(3, 4): -1.0}, [[[3, 4], -1.0]]):
        with pytest.raises(ValueError, match=r"sequence_bias of several tokens, such as .3, 4."):
            model.generate_batch([prompt], GenerationConfig(max_new_tokens=3, sequence_bias=bias))


@pytest.mark.parametrize(
    ("running", "asked", "message"),
    [
        ({"do_sample": True, "temperature": 0.5}, {"do_sample": True}, "temperature=1.0, and all .* temperature=0.5"),
        ({"do_sample": True}, {"do_sample": False}, "do_sample=False, and all"),
        ({}, {"suppress_tokens": [3]}, r"suppress_tokens=\[3\], and all"),
        ({}, {"temperature": 0.5}, None),  # nothing is sampled
        ({}, {"sequence_bias": {}, "suppress_tokens": []}, None),
        ({"do_sample": True, "temperature": 1.0}, {"do_sample": True, "top_p": 1.0, "max_new_tokens": 3}, None),
    ],
)
def test_requests_join_only_with_the_settings_that_all_share(
    running: dict[str, Any], asked: dict[str, Any], message: str | None
) -> None:
    given = GenerationConfig(**running), GenerationConfig(**asked)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_joins(*given)


def test_every_setting_of_transformers_is_known_to_be_served_or_not() -> None:
    """A new one would be ignored silently, or end the thread that computes all requests."""
    of_one_request = {"max_new_tokens", "max_length", "eos_token_id"}
    read_from_logits = {"remove_invalid_values", "renormalize_logits"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert (
        fields - {*UNSERVED, *SHARED, *SHARED_IN_SAMPLING} - of_one_request - read_from_logits - WITHOUT_EFFECT == set()
    )


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 5, "prompt of a request is empty; give it at least one token"),
        ([3, 97], 5, "token 97 of a request is not in the vocabulary of 97 tokens"),
        ([-1], 5, "token -1 of a request"),
        ([1, 2.5], 5, r"token 2\.5 of a request is not in the vocabulary"),
        ([1] * 500, 13, r"500 tokens and 13 new ones.*\(512\) positions.*ask for at most 12 new tokens"),
        ([1] * 511, 2, r"511 tokens and 2 new ones.*ask for at most 1 new tokens"),
        ([1] * 512, None, "512 tokens and 1 new ones.*shorten the prompt$"),
        ([1], 0, "asks for 0 new tokens; it must ask for 1 or more"),
        ([1], 2.0, r"asks for 2\.0 new tokens; it must ask for 1 or more, a whole number"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is(prompt: list[int], new: Any, message: str) -> None:
    model = make_model()
    endless = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[1, 2, 3], prompt], endless, max_new_tokens=new)
    with (
        model.continuous_batching_context_manager(
            endless, continuous_batching_config=ContinuousBatchingConfig(**SETTINGS)
        ) as manager,
        pytest.raises(ValueError, match=message),
    ):
        manager.add_request(prompt, max_new_tokens=new)


def test_the_default_cache_has_room_for_the_requests_and_leaves_the_machine_its_memory() -> None:
    model, prompts = make_model(), random_prompts([19, 30])
    with model.continuous_batching_context_manager(GREEDY) as manager:
        names = manager.add_requests(prompts)
        finished = results(manager, 2)
        cache = manager.batch_processor.cache
        assert cache.cache_tensor.numel() < 200e6 and cache.max_tokens_read >= 64 * 512
    for name, prompt in zip(names, prompts, strict=True):
        assert_same_tokens(model, prompt, finished[name].generated_tokens)


def test_the_default_cache_has_room_for_twice_what_is_announced() -> None:
    settings = ContinuousBatchingConfig(page_size=8)
    hints = WorkloadHints(num_requests=5, max_prompt_length=20, max_generated_length=11)
    assert with_sizes(ServedModel(make_model()), settings, hints).num_blocks == 2 * 5 * 4  # 31 tokens take four pages
    assert settings.num_blocks is None  # the caller's stay as they are
    unlimited, longest = WorkloadHints(max_prompt_length=20), ServedModel(make_model(max_position_embeddings=63))
    assert with_sizes(longest, settings, unlimited).num_blocks == 2 * 64 * 8
    settings.max_requests_per_batch = 3
    assert with_sizes(longest, settings, unlimited).num_blocks == 2 * 3 * 8
    settings.max_memory_percent = 0.5
    assert with_sizes(longest, settings, unlimited).num_blocks is None


def test_the_default_cache_takes_less_than_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hints = (
        ServedModel(make_model().double()),
        WorkloadHints(num_requests=1, max_prompt_length=8, max_generated_length=7),
    )
    settings, layout = ContinuousBatchingConfig(page_size=8), model.layers.layout
    keys_or_values = 4 * 8 * layout.kv_heads * layout.width * 8  # bytes of four pages in float64
    total, allocated = 1000 + 4 * 2 * 3 * keys_or_values, 1000  # three layers
    for more, blocks in ((0, None), (4, 4)):
        breakdown = (torch.device("cpu"), total + more, 0, allocated)
        monkeypatch.setattr(cache_size, "get_device_and_memory_breakdown", lambda found=breakdown: found)
        assert with_sizes(model, settings, hints).num_blocks == blocks


@pytest.mark.parametrize(("on_cpu", "on_gpu", "blocks"), [(0.5, 99, 1), (3.5, 99, 3), (99, 2.5, 2), (99, 99, 4)])
def test_beside_a_gpu_the_default_cache_of_a_model_on_a_cpu_fits_into_a_quarter_of_both_memories(
    on_cpu: float, on_gpu: float, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers tells of the GPU alone, would choose by its memory, and refuses more than that. Sizes in pages."""
    model = ServedModel(make_model())
    hints = WorkloadHints(num_requests=1, max_prompt_length=8, max_generated_length=7)
    settings, layout = ContinuousBatchingConfig(page_size=8), model.layers.layout
    page = 3 * 2 * 8 * layout.kv_heads * layout.width * 4  # bytes in three layers in float32
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": model.get_memory_footprint() + int(4 * on_cpu * page)}
    monkeypatch.setattr(os, "sysconf", memory.__getitem__)
    breakdown = (torch.device("cuda"), 1000 + int(4 * on_gpu * page), 0, 1000)
    monkeypatch.setattr(cache_size, "get_device_and_memory_breakdown", lambda: breakdown)
    assert with_sizes(model, settings, hints).num_blocks == blocks


def test_requests_without_tokens_which_pad_a_batch_have_no_rows() -> None:
    """Transformers pads batches where it compiles the model."""
    read, new_rows = torch.tensor([4, 5, 6, 0, 9]), torch.tensor([6, 0, 9])
    allocator: Any = SimpleNamespace(index=1)
    found = find_requests(allocator, [0, 1, 3, 3], [0, 3, 5, 5], [read[:0], read], [new_rows[:0], new_rows])
    assert found.spans == [Span(slice(0, 1), slice(0, 3)), Span(slice(1, 3), slice(3, 5))]
    assert found.table is read and found.new_rows is new_rows
    assert find_requests(allocator, [0, 3], [0, 3], [read[:0]] * 2, [new_rows] * 2).table is new_rows


def test_an_answer_may_end_with_the_last_position() -> None:
    config = make_model().config
    requirements.check_request(config, [1] * 500, 12)
    requirements.check_request(config, [1] * 511, None)


def test_a_paged_cache_of_another_manager_is_refused_by_the_model() -> None:
    with pytest.raises(ValueError, match=r"own paged cache lacks rows that DCFormerModel needs .*; get the manager"):
        make_model()(torch.ones(1, 3, dtype=torch.long), cache=object())


def test_keywords_that_only_generate_reads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"generate_batch would ignore \['logits_processor', 'temperature'\]; set"):
        make_model().generate_batch([[1]], GREEDY, temperature=0.5, logits_processor=[])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph needs steps of fixed shapes"),
        ({"use_cuda_graph": (False, True)}, "use_cuda_graph"),
        ({"use_async_batching": True}, "use_async_batching is not served"),
    ],
)
def test_settings_that_are_not_served_are_refused_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model().generate_batch([[1]], GREEDY, ContinuousBatchingConfig(**settings))


def test_quantized_caches_and_angles_that_depend_on_other_requests_are_refused() -> None:
    quantized = GenerationConfig(**{**GREEDY.to_dict(), "cache_implementation": "quantized"})
    with pytest.raises(ValueError, match="would quantize composition factors"):
        make_model().init_continuous_batching(quantized)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    with pytest.raises(ValueError, match="requests would change each other"):
        make_model(rope_parameters=rope).init_continuous_batching(GREEDY)


@pytest.mark.parametrize("installed", ["5.17.0", "5.22.3", "5.25.0", "6.0.0"])
def test_other_versions_of_transformers_are_named(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "version", lambda name: installed)
    with pytest.raises(ImportError, match=rf"made for transformers>=5.23,<5.25, and {installed} is installed; pip"):
        make_model().generate_batch([[1]], GREEDY)


@pytest.mark.parametrize("installed", ["5.23.0", "5.24.4", "5.23.0.dev0"])
def test_known_versions_of_transformers_pass(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "version", lambda name: installed)
    requirements.check_transformers()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RCMHAForCausalLM(RCMHAConfig()),
        lambda: RCMHAForCausalLM(RCMHAConfig(attention_type="mha", position_scheme="alibi")),
        lambda: RCMHAForCausalLM(RCMHAConfig(memory_type="segment", mem_len=8)),
    ],
    ids=["rcmha", "mha", "segment-memory"],
)
def test_rcmha_is_refused_at_every_door(make: Any) -> None:
    model = make().eval()
    for door in (model.init_continuous_batching, lambda: model.generate_batch([[1, 2]])):
        with pytest.raises(ValueError, match="keeps only keys and values of earlier tokens, and RCMHAForCausalLM"):
            door()
    with pytest.raises(ValueError, match="keeps only keys"), model.continuous_batching_context_manager():
        pass


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_manager_made_by_hand_gets_our_message_and_no_wrong_token(implementation: str) -> None:
    model = RCMHAForCausalLM(RCMHAConfig(attn_implementation=implementation, vocab_size=97)).eval()
    try:
        manager = ContinuousBatchingManager(model, GREEDY, ContinuousBatchingConfig(**SETTINGS))
    except ValueError:
        return
    manager.start()
    name = manager.add_request([1, 2, 3])
    result = results(manager, 1)[name]
    manager.stop()
    assert result.generated_tokens == [] and "keeps only keys and values of earlier tokens" in result.error


def test_transformers_still_has_no_door_of_its_own() -> None:
    """When this fails, Transformers serves other implementations or rows by itself: use that in place of ours."""
    with pytest.raises(ValueError, match="chunked is not supported for continuous batching"):
        ContinuousBatchingManager(make_model(), GREEDY, ContinuousBatchingConfig(**SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FULL], ids=["sliding", "full"])
def test_two_hundred_requests_over_time_get_the_tokens_of_generate(options: dict[str, Any]) -> None:
    """Lengths from 1 to 500, some with a common start, chunked prefill, and a cache that cannot hold all at once."""
    model = make_model(max_position_embeddings=1024, **options)
    chooser = random.Random(5)
    prompts = random_prompts([chooser.randint(1, 500) for _ in range(200)])
    for index in range(0, 200, 5):
        prompts[index] = (prompts[0][:100] + prompts[index])[:500]
    lengths = [chooser.randint(1, 40) for _ in prompts]
    names: dict[str, int] = {}
    with manager_of(model, page_size=16, num_blocks=160, max_batch_tokens=256) as manager:

        def send() -> None:
            for index, (prompt, new) in enumerate(zip(prompts, lengths, strict=True)):
                names[manager.add_request(prompt, max_new_tokens=new)] = index
                time.sleep(chooser.random() * 0.05)

        sender = threading.Thread(target=send)
        sender.start()
        finished = results(manager, 200, seconds=500)
        sender.join()
    for name, result in finished.items():
        assert result.error is None and len(result.generated_tokens) == lengths[names[name]]
        assert_same_tokens(model, prompts[names[name]], result.generated_tokens)
