import copy
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from cases.checkpoints import edit_config
from cases.tokenizers import that_knows
from lm_eval import tasks as lm_eval_tasks
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import (
    get_file_task_name,
    get_latest_filename,
    get_results_filenames,
    get_sample_results_filenames,
    make_table,
)
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from dynattn import DCFormerConfig, DCFormerForCausalLM, compose_heads_of
from dynattn.scripts.cli import main
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.evaluate import catalog as catalog_module
from dynattn.scripts.evaluate import lm_eval_files
from dynattn.scripts.evaluate.arguments import EvaluateArguments
from dynattn.scripts.evaluate.catalog import TaskCatalog
from dynattn.scripts.evaluate.harness import DIRECT, evaluate_model
from dynattn.scripts.evaluate.heldout import score_documents
from dynattn.scripts.evaluate.lm_eval_files import write_lm_eval_files
from dynattn.scripts.evaluate.quoted import quoted_scores
from dynattn.scripts.evaluate.result_files import write_results
from dynattn.scripts.evaluate.result_table import format_table
from dynattn.scripts.evaluate.results import Metric, Results, TaskResult, read_lm_eval
from dynattn.scripts.evaluate.strict_lm import StrictHFLM
from dynattn.scripts.evaluate.suites import SUITES, TASKS
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

CONTEXT = 384
VOCABULARY = 384
TASK = "dynattn_owner"
SUITE_FOLDERS = ("arc", "hellaswag", "lambada", "logiqa", "piqa", "sciq", "super_glue/wsc", "winogrande")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = train_bpe([builtin_documents("train")[:5]], VOCABULARY)
    made.bos_token = made.pad_token = None  # as of a GPT-2
    return made


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lm-eval's own thousands of task files, which take many seconds to read, only those of the Pythia suite."""
    theirs = Path(str(lm_eval_tasks.__file__)).parent

    def read(folders: tuple[Path, ...], *, include_defaults: bool) -> lm_eval_tasks.TaskManager:
        suite = [theirs / name for name in SUITE_FOLDERS if include_defaults]
        return lm_eval_tasks.TaskManager(include_path=[*folders, *suite], include_defaults=False)

    monkeypatch.setattr(catalog_module, "_task_manager", read)


@pytest.fixture(params=["llama", "dcformer"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "checkpoint"
    llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def llama(**overrides: float) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 0}
    fields: dict[str, Any] = sizes | limits | overrides
    return LlamaForCausalLM(LlamaConfig(**fields))


def dcformer() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    return DCFormerForCausalLM(DCFormerConfig.from_size("tiny", **sizes, **limits))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "dcformer": dcformer}


def test_heldout_bits_per_byte_is_the_hand_computed_sum(
    tokenizer: PreTrainedTokenizerFast, held_out: list[str]
) -> None:
    model = llama()
    results = evaluate_model(model, tokenizer, ["builtin_heldout"], limit=3, max_length=100)
    bits, size = 0.0, 0
    for document in held_out[:3]:
        tokens = [tokenizer.eos_token_id, *tokenizer.encode(document)]
        size += len(document.encode())
        for start in range(0, len(tokens) - 1, 100):
            end = min(start + 100, len(tokens) - 1)
            inputs = tokens[max(0, end - 100) : end]
            with torch.no_grad():
                log_probs = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
            for position in range(start, end):
                bits -= log_probs[position - end, tokens[position + 1]].item() / math.log(2)
    assert results.value("builtin_heldout", "bits_per_byte") == pytest.approx(bits / size, rel=1e-6)
    assert results.value(DIRECT, "bits_per_byte") == pytest.approx(bits / size, rel=1e-6)
    assert results.warnings == []


def test_direct_scores_match_their_definitions(tokenizer: PreTrainedTokenizerFast, held_out: list[str]) -> None:
    document = held_out[0][:300]
    tokens = tokenizer.encode(document)
    model = llama()
    with torch.no_grad():  # else it finds no token, and any share of none is right
        model.lm_head.weight[max(tokens, key=tokens.count)] *= 40
    scores = score_documents(model, tokenizer, [document], max_length=CONTEXT)
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.eos_token_id, *tokens[:-1]]])).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens)).item()
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(loss * len(tokens) / math.log(2) / len(document.encode()), rel=1e-5)
    hits = (logits.argmax(-1) == torch.tensor(tokens)).sum().item()
    assert scores["accuracy"] == pytest.approx(hits / len(tokens)) and hits > 0


def test_scores_do_not_depend_on_the_batch_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    names = ["builtin_heldout", "dynattn_k*"]
    options: dict[str, Any] = {"limit": 5, "max_length": 128, "truncate": True, "log_samples": True}
    one, four = (evaluate_model(model, tokenizer, names, batch_size=size, **options) for size in (1, 4))
    assert one.warnings == four.warnings == []
    for first, second in zip(one.samples, four.samples, strict=True):
        assert flat(first["filtered_resps"]) == pytest.approx(flat(second["filtered_resps"]), rel=1e-4, abs=1e-4)


def flat(responses: list) -> list[float]:
    return [
        number for response in responses for number in (response if isinstance(response, list | tuple) else [response])
    ]


def test_no_prompt_is_cut_to_make_room_for_an_answer_unless_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = "x" * 20
    request = Instance("generate_until", {}, (prompt, {"until": ["no"], "max_gen_toks": 8}), 0)

    def answer(max_length: int, truncate: bool = False) -> list[str]:
        lm = StrictHFLM(llama(), tokenizer, truncate=truncate, carry_memory=False, max_length=max_length)
        return lm.generate_until([request], disable_tqdm=True)

    needed = len(tokenizer.encode(prompt)) + 8
    assert answer(needed) == answer(CONTEXT)
    with pytest.raises(UserError, match=f"has, with its answer, {needed} tokens but the model takes {needed - 1};"):
        answer(needed - 1)
    assert len(answer(needed - 1, truncate=True)) == 1
    with pytest.raises(UserError, match="answers of up to 8 tokens but the model takes 8"):
        answer(8, truncate=True)


def test_an_answer_longer_than_the_context_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = StrictHFLM(llama(), tokenizer, truncate=True, carry_memory=False, max_length=8)
    request = Instance("loglikelihood", {}, ("a", "x" * 20), 0)
    length = len(tokenizer.encode("x" * 20))
    with pytest.raises(UserError, match=f"an answer has {length} tokens but the model takes 8; leave the task out"):
        lm.loglikelihood([request], disable_tqdm=True)


def test_an_answer_or_a_prompt_without_tokens_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    # lm-eval would give the answer the probability 1, and begin the answer to the empty prompt with padding.
    lm = StrictHFLM(llama(), joining(tokenizer), truncate=False, carry_memory=False, batch_size=2)
    requests = [Instance("loglikelihood", {}, ("a b", answer), 0) for answer in (" c", " d")]
    assert all(score < 0 for score, _ in lm.loglikelihood(requests[1:], disable_tqdm=True))
    with pytest.raises(UserError, match="the answer ' c' has no tokens of its own after the prompt that ends 'a b'"):
        lm.loglikelihood(requests, disable_tqdm=True)
    empty = [Instance("generate_until", {}, (text, {"max_gen_toks": 2}), 0) for text in ("", "a")]
    with pytest.raises(UserError, match="a prompt is empty, and the tokenizer begins texts with no token"):
        lm.generate_until(empty, disable_tqdm=True)


def joining(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that has a token for "b c"."""
    tokens = {token: number for number, token in enumerate([tokenizer.eos_token, *"abcd ", " c", "b c"])}
    model = models.BPE(tokens, [(" ", "c"), ("b", " c")])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token=tokenizer.eos_token)


def test_a_tokenizer_that_ends_texts_is_refused_where_an_answer_follows(tokenizer: PreTrainedTokenizerFast) -> None:
    # lm-eval would score " b" after its prompt's end, and without the tokens that this end displaces.
    ending = copy.deepcopy(tokenizer)
    added = [(ending.eos_token, ending.eos_token_id)]
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {ending.eos_token}", special_tokens=added)
    lm = StrictHFLM(llama(), ending, truncate=False, carry_memory=False)
    for score, given in ((lm.loglikelihood, " b"), (lm.generate_until, {"max_gen_toks": 2})):
        with pytest.raises(UserError, match=r"the tokenizer ends every text with .*, prompts too"):
            score([Instance("", {}, ("a", given), 0)], disable_tqdm=True)
    text = [Instance("loglikelihood_rolling", {}, ("a b",), 0)]
    same = StrictHFLM(llama(), tokenizer, truncate=False, carry_memory=False).loglikelihood_rolling(text)
    assert lm.loglikelihood_rolling(text) == same


def test_windows_that_read_the_same_tokens_are_scored_as_each_asks(tokenizer: PreTrainedTokenizerFast) -> None:
    # The windows of the middle and of the end read the same tokens, and are scored from different ones on.
    model = llama(initializer_range=1.0)
    texts = [Instance("loglikelihood_rolling", {}, ("~!" * 15,), 0)]

    def score(batch_size: int) -> list[float]:
        lm = StrictHFLM(model, tokenizer, truncate=False, carry_memory=False, max_length=12, batch_size=batch_size)
        return lm.loglikelihood_rolling(texts, disable_tqdm=True)

    assert score(3) == pytest.approx(score(1), rel=1e-6)


def test_nothing_is_generated_from_logits_that_are_nan(tokenizer: PreTrainedTokenizerFast) -> None:
    model = llama()
    model.lm_head.weight.data[3] = math.nan
    lm = StrictHFLM(model, tokenizer, truncate=False, carry_memory=False)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        lm.generate_until([Instance("generate_until", {}, ("x", {"max_gen_toks": 2}), 0)], disable_tqdm=True)


def test_results_equal_simple_evaluate(tokenizer: PreTrainedTokenizerFast) -> None:
    model = llama()
    options: dict[str, Any] = {"num_fewshot": 1, "limit": 24, "log_samples": True}
    ours = evaluate_model(model, tokenizer, [TASK, "builtin_heldout"], seed=7, **options)
    catalog = TaskCatalog([TASK, "builtin_heldout"])
    evaluated = lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=3),
        tasks=catalog.names,
        fewshot_random_seed=7,
        task_manager=catalog._manager,
        **options,
    )
    theirs = evaluated["results"]
    assert ours.value(TASK, "acc", num_fewshot=1) == theirs[TASK]["acc,none"]
    assert ours.value(TASK, "acc_norm") == theirs[TASK]["acc_norm,none"]
    prompts = [sample["arguments"] for sample in ours.samples if sample["task"] == TASK]
    assert prompts == [sample["arguments"] for sample in evaluated["samples"][TASK]]
    expected = theirs["builtin_heldout"]["bits_per_byte,none"]
    assert ours.value("builtin_heldout", "bits_per_byte", num_fewshot=0) == pytest.approx(expected, rel=1e-6)


def test_padding_that_reaches_earlier_tokens_is_reported(tokenizer: PreTrainedTokenizerFast) -> None:
    class Leaky(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
            output = super().forward(input_ids, **kwargs)
            padded = (input_ids == 0).sum(1) > 1
            output.logits = output.logits + 9 * padded[:, None, None] * torch.arange(VOCABULARY).cos()
            return output

    results = evaluate_model(Leaky(llama().config), tokenizer, ["builtin_heldout"])
    assert "without padding: the model lets padding" in results.warnings[0]
    assert "warning: bits per byte" in format_table(results)


def test_the_model_and_tokenizer_stay_as_they_were(tokenizer: PreTrainedTokenizerFast) -> None:
    model = llama().train()
    assert tokenizer.pad_token is None
    evaluate_model(model, tokenizer, [TASK], limit=2)
    assert model.training
    assert tokenizer.pad_token is None


def test_several_numbers_of_examples(tokenizer: PreTrainedTokenizerFast) -> None:
    results = evaluate_model(llama(), tokenizer, [TASK, "builtin_heldout"], num_fewshot=[0, 1], limit=3)
    assert [(result.task, result.num_fewshot) for result in results.tasks] == [
        (TASK, 0), ("builtin_heldout", 0), (DIRECT, 0), (TASK, 1),
    ]  # fmt: skip


def test_groups_have_a_score_for_each_number_of_examples(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Also a group of groups, and a group whose tasks get different numbers of examples because one allows none."""
    score = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    for name, lines in {
        "without": f"include: {TASKS}/dynattn_owner.yaml\ntask: without\nnum_fewshot: 0",
        "mixed": f"group: mixed\ntask: [without, dynattn_kind_of]\n{score}",
        "inner": f"group: inner\ntask: [dynattn_owner, dynattn_possession]\n{score}",
        "outer": f"group: outer\ntask: [inner]\n{score}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(lines)
    catalog = TaskCatalog(["mixed", "outer"], tmp_path)
    results = evaluate_model(llama(), tokenizer, catalog, num_fewshot=[1, 2], limit=2)
    groups = [(result.task, result.num_fewshot) for result in results.tasks if result.samples > 2]
    assert groups == [(name, number) for number in (1, 2) for name in ("mixed", "inner", "outer")]
    assert {result.metrics["acc"].higher_is_better for result in results.tasks} == {True}


def test_a_suite_without_network_says_what_is_missing_and_runs_the_rest(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = TaskCatalog([TASK])
    found = catalog._manager.load([TASK])
    catalog.names, catalog.is_local = [*SUITES["pythia"], TASK], False

    def load(names: list[str]) -> dict[str, Any]:
        if names == [TASK]:
            return found
        raise {"sciq": ConnectionError("unreachable"), "piqa": ImportError("needs a package\nand more")}.get(
            names[0], ConnectionError("Couldn't reach the Hub")
        )

    monkeypatch.setattr(catalog, "_manager", Namespace(load=load))
    results = evaluate_model(llama(), tokenizer, catalog, limit=2)
    assert [result.task for result in results.tasks] == [TASK]
    assert list(results.unavailable) == list(SUITES["pythia"])
    assert results.unavailable["sciq"] == "the Hub cannot be reached and the local cache has no copy of the data"
    assert results.unavailable["piqa"] == "needs a package"
    assert "not available: piqa: needs a package" in format_table(results).splitlines()


def test_a_task_of_the_user_that_cannot_be_loaded_does_not_stop_the_others(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lines = f"task: lost\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path}/lost.json}}\n"
    (tmp_path / "lost.yaml").write_text(lines + "test_split: test\ndoc_to_text: x\ndoc_to_target: y\n")
    results = evaluate_model(llama(), tokenizer, TaskCatalog(["lost", TASK], tmp_path), limit=2)
    assert [result.task for result in results.tasks] == [TASK]
    assert results.unavailable == {"lost": f"Unable to find '{tmp_path}/lost.json'"}


def test_a_task_without_any_text_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text('{"text": ""}\n')
    data = f"dataset_path: json\ncustom_dataset: null\ndataset_kwargs: {{data_files: {{test: {tmp_path}/empty.json}}}}"
    (tmp_path / "empty.yaml").write_text(f"include: {TASKS}/builtin_heldout.yaml\ntask: empty\n{data}\n")
    with pytest.raises(UserError, match="the documents of a task hold no text"):
        evaluate_model(llama(), tokenizer, TaskCatalog(["empty"], tmp_path))


def test_texts_that_a_tokenizer_cannot_express_are_told(held_out: list[str], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = that_knows("the")
    evaluate_model(llama(), tokenizer, ["builtin_heldout"], limit=1)
    tokens = tokenizer.tokenize(held_out[0])
    unknown = f"{len(tokens) - tokens.count('the')} of {len(tokens)} tokens are <unk>"
    assert caplog.messages == [f"{unknown}: what they stand for is not scored, and bits per byte are too low"]


@pytest.mark.parametrize(("task", "most"), [("dcformer_odd_one_out", 23), ("dynattn_owner", 36)])
def test_more_examples_than_a_task_has_are_refused(task: str, most: int, tokenizer: PreTrainedTokenizerFast) -> None:
    options: dict[str, Any] = {"limit": 1, "truncate": True}
    evaluate_model(llama(), tokenizer, [task], num_fewshot=most, **options)
    with pytest.raises(UserError, match="num_fewshot is more examples than a task has beside its question; lower it"):
        evaluate_model(llama(), tokenizer, [task], num_fewshot=most + 1, **options)


def test_data_from_files_has_no_name_on_the_hub() -> None:
    def described(**config: object) -> tuple[str | None, str | None]:
        raw: dict[str, Any] = {"n-shot": {"t": 0}, "higher_is_better": {}, "versions": {}, "configs": {"t": config}}
        (result,) = read_lm_eval({**raw, "results": {"t": {"sample_len": 1}}}, {})
        return result.dataset, result.dataset_config

    assert described(dataset_path="super_glue", dataset_name="wsc.fixed") == ("super_glue", "wsc.fixed")
    assert described(dataset_path="me/set", dataset_kwargs={"data_files": "a.json"}) == ("me/set", None)
    assert described(dataset_path="json", dataset_kwargs={"data_files": "mine.json"}) == (None, None)
    assert described(dataset_path="/data/mine") == described() == (None, None)


def test_large_errors_are_written_as_large_values_are() -> None:
    large = Results({}, {}, {}, [TaskResult("x", 0, 2, {"perplexity": Metric(2.5e21, 3.7e26, False)})])
    assert "| 2.5e+21 | 3.7e+26 |" in format_table(large)


@pytest.mark.usefixtures("few_tasks")
def test_the_pythia_suite_offline(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["evaluate", str(checkpoint), "--suite", "pythia", "--output", str(output)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == list(SUITES["pythia"])
    assert list(output.iterdir()) == []


@pytest.mark.slow
def test_lm_eval_knows_the_whole_pythia_suite() -> None:
    assert TaskCatalog(SUITES["pythia"]).names == list(SUITES["pythia"])


def test_command_line_writes_complete_results(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = ["--limit", "12", "--num_fewshot", "1", "--log_samples", "--seed", "5", "--output", str(output)]
    assert main(["evaluate", str(checkpoint), "--tasks", f"builtin_heldout,{TASK}", *options]) == 0
    table = capsys.readouterr().out
    content = json.loads((output / "results.json").read_text())
    assert len(content["model"].pop("weights_sha256")) == 64
    assert content["model"] | {"config_sha256": ""} == {
        "path": str(checkpoint), "model_type": "llama", "architecture": "LlamaForCausalLM", "config_sha256": "",
        "parameters": llama().num_parameters(), "dtype": "float32",
    }  # fmt: skip
    assert content["settings"] == {
        "tasks": ["builtin_heldout", TASK], "num_fewshot": [1], "limit": 12, "batch_size": 8, "max_length": CONTEXT,
        "truncate": False, "carry_memory": False, "segment": None, "seed": 5,
    }  # fmt: skip
    assert set(content["environment"]) == {"commit", "date", "hardware", "threads", "versions"}
    assert [result["task"] for result in content["tasks"]] == ["builtin_heldout", DIRECT, TASK]
    owner = content["tasks"][2]
    assert (owner["num_fewshot"], owner["samples"], owner["chance"]) == (1, 12, 0.3611)
    assert owner["metrics"]["acc"]["higher_is_better"] and owner["metrics"]["acc"]["stderr"] > 0
    rows = {(row[0], row[3]): row[-1] for row in map(cells, table.splitlines()) if len(row) == 8}
    assert rows[TASK, "acc"] == "0.3611" and rows["builtin_heldout", "word_perplexity"] == ""
    assert f"| {TASK} " in table and (output / "results.md").read_text(encoding="utf-8").strip() in table
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert [sample["task"] for sample in samples] == ["builtin_heldout"] * 12 + [TASK] * 12
    assert sorted(path.name for path in output.iterdir()) == ["lm-eval", "results.json", "results.md", "samples.jsonl"]
    check_lm_eval_files(output, content, samples)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def check_lm_eval_files(output: Path, content: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """lm-eval's own functions find the files by their names, and read the same scores and samples."""
    (folder,) = (output / "lm-eval").iterdir()
    names = [str(path) for path in folder.iterdir()]
    newest = get_latest_filename(get_results_filenames(names))
    stored = json.loads(Path(newest).read_text())
    assert stored["results"][TASK]["acc,none"] == content["tasks"][2]["metrics"]["acc"]["value"]
    assert TASK in make_table(stored)
    assert stored["config"]["model_num_parameters"] == content["model"]["parameters"]
    for task in ("builtin_heldout", TASK):
        (file,) = (name for name in get_sample_results_filenames(names) if get_file_task_name(Path(name).name) == task)
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        assert [line["doc_id"] for line in lines] == [one["doc_id"] for one in samples if one["task"] == task]


def test_files_that_lm_eval_could_not_write_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs errors of the disk and goes on."""
    monkeypatch.setattr(EvaluationTracker, "save_results_aggregated", lambda *_: None)
    monkeypatch.setattr(lm_eval_files, "_circumstances", lambda *_: {})
    with pytest.raises(UserError, match=r"lm-eval wrote 0 of 1 result files into .*lm-eval; is the disk full"):
        write_lm_eval_files([{"results": {}}], tmp_path, {"model": {"path": "x"}})


def test_the_lm_eval_command_knows_our_tasks_and_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(self: HarnessCLI, arguments: Namespace) -> None:
        if arguments.tasks == ["none"]:
            raise ValueError("no such task\n")
        paths.append(arguments.include_path)

    paths: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the command replaces
    monkeypatch.setattr(HarnessCLI, "execute", execute)
    command = ["lm-eval", "run", "--model", "hf", "--tasks"]
    assert main([*command, TASK]) == main([*command, TASK, "--include_path", "mine"]) == 0
    assert paths == [[str(TASKS)], [str(TASKS), "mine"]]
    assert main([*command, "none"]) == 2
    assert capsys.readouterr().err.endswith("no such task\n")


def test_quoted_scores_stand_beside_ones_own_and_say_so(tokenizer: PreTrainedTokenizerFast) -> None:
    results = evaluate_model(llama(), tokenizer, [TASK], limit=2, quoted=["nearest", "pythia-12b"])
    assert {one.model for one in results.quoted} == {"pythia-70m", "pythia-12b"}
    assert "quoted" not in format_table(results)  # nobody has published scores of this task
    own = TaskResult("piqa", 0, 10, {"acc": Metric(0.5, 0.1, True)})
    lines = format_table(replace(results, tasks=[own])).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:8]] == ["piqa", "0", "10", "acc", "↑", "0.5000", "0.1000"]
    assert [cell.strip() for cell in lines[3].split("|")[4:8]] == ["quoted: pythia-70m", "", "0.5947", "0.0115"]
    assert "quoted: pythia-12b" in lines[4] and "0.7601" in lines[4]
    assert lines[-1].startswith("quoted, not measured here, with an earlier lm-eval: github.com/EleutherAI/pythia")


@pytest.mark.parametrize(
    ("parameters", "nearest"), [(1, "pythia-70m"), (300e6, "pythia-410m"), (1.2e9, "pythia-1.4b"), (1e12, "pythia-12b")]
)
def test_the_nearest_pythia_has_the_nearest_ratio_of_sizes(parameters: int, nearest: str) -> None:
    assert {one.model for one in quoted_scores(["nearest"], parameters)} == {nearest}


def test_scores_that_nobody_published_are_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"no scores of \['pythia-3b'\] are quoted; choose from nearest, pythia-70m"):
        EvaluateArguments(model="nowhere", quoted=["pythia-3b"])
    assert EvaluateArguments(model="nowhere", suite="pythia").quoted_models() == ["nearest"]
    assert EvaluateArguments(model="nowhere").quoted_models() == []


def test_arguments_from_a_yaml_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = tmp_path / "evaluate.yaml"
    arguments.write_text(f"model: {checkpoint}\ntasks: {TASK}\nlimit: 2\nnum_fewshot: 1\n")
    assert main(["evaluate", str(arguments), "--batch_size", "1"]) == 0
    assert f"| {TASK} | 1     | 2 |" in capsys.readouterr().out
    arguments.write_text(f"model: {checkpoint}\nnum_fewshot: [many]\n")
    assert main(["evaluate", str(arguments)]) == 2
    assert_one_line(capsys, f"{arguments}: argument --num_fewshot/--num-fewshot: invalid int value: 'many'")


@pytest.mark.slow
def test_lm_eval_command_knows_our_tasks_and_models(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "mine.yaml").write_text(f"include: {TASKS / f'{TASK}.yaml'}\ntask: mine\n")
    options = ["--device", "cpu", "--limit", "2", "--include_path", str(extra)]
    command = ["lm-eval", "run", "--model", "hf", "--model_args", f"pretrained={checkpoint}", *options]
    assert main([*command, "--tasks", f"mine,{TASK}"]) == 0
    assert f"|{TASK}|" in capsys.readouterr().out
    assert main([*command, "--tasks", "yours"]) == 2
    assert "lm-eval: error: Tasks not found: yours" in capsys.readouterr().err


def damage(checkpoint: Path, how: str) -> None:
    weights = checkpoint / "model.safetensors"
    match how:
        case "no tokenizer":
            (checkpoint / "tokenizer.json").unlink()
            (checkpoint / "tokenizer_config.json").unlink()
        case "broken tokenizer":
            (checkpoint / "tokenizer.json").write_text('{"version": ')
        case "broken config":
            (checkpoint / "config.json").write_text('{"model_type": ')
        case "config of another kind":
            (checkpoint / "config.json").write_text("[]")
        case "field of another kind":
            edit_config(checkpoint, num_attention_heads=0)
        case "tokenizer of another kind":
            (checkpoint / "tokenizer.json").write_text("[]")
        case "tokenizer without tokens":
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(checkpoint)
        case "both ways":
            sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
            BertLMHeadModel(BertConfig(vocab_size=384, **sizes)).save_pretrained(checkpoint)
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "NaN weights":
            model = llama()
            model.lm_head.weight.data[3, 3] = math.nan
            model.save_pretrained(checkpoint)
        case "small embedding":
            llama(vocab_size=300).save_pretrained(checkpoint)
        case "another size":
            edit_config(checkpoint, vocab_size=400)
        case "unknown type":
            (checkpoint / "config.json").write_text('{"model_type": "unheard_of"}')
        case "no config":
            (checkpoint / "config.json").unlink()
        case "composition without options":
            composed = llama()
            compose_heads_of(composed)
            composed.save_pretrained(checkpoint)
        case "adapter":
            (checkpoint / "config.json").rename(checkpoint / "adapter_config.json")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no tokenizer", "there is no usable tokenizer in"),
        ("broken tokenizer", "there is no usable tokenizer in"),
        ("broken config", "cannot load a causal language model from"),
        ("config of another kind", "cannot load a causal language model from"),
        ("field of another kind", "cannot load a causal language model from"),
        ("tokenizer of another kind", "there is no usable tokenizer in"),
        ("tokenizer without tokens", "the tokenizer has neither a bos nor an eos token"),
        ("both ways", "is a bert that reads each token with those after it"),
        ("truncated weights", "cannot load a causal language model from"),
        ("NaN weights", "the model's logits are NaN"),
        ("small embedding", "the tokenizer has ids up to 383 but the model embeds 300 (0 ... 299)"),
        ("another size", "has the shape [384, 32] and would need [400, 32]; use the configuration that belongs"),
        ("unknown type", "`unheard_of`"),
        ("unknown type", "goes with --import"),
        ("no config", "has no config.json; give that of a checkpoint"),
        ("composition without options", "weights of composed heads, such as model.layers.0.self_attn.composition."),
        ("adapter", "holds an adapter (adapter_config.json); merge it into its model, and save that"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    how: str, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint, how)
    assert main(["evaluate", str(checkpoint), "--tasks", TASK, "--limit", "2"]) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "dynattn_ownr"], "there is no task 'dynattn_ownr'; did you mean dynattn_owner"),
        (["--tasks", TASK, "dynattn_synthetic"], f"task '{TASK}' is asked for twice"),
        (["--tasks", ","], "no task is named"),
        (["--tasks", TASK, "--max_length", "999"], f"exceeds the model's context of {CONTEXT} tokens"),
        (
            ["--tasks", "dynattn_two_step", "--num_fewshot", "9", "--limit", "3"],
            f"but the model takes {CONTEXT}; lower",
        ),
        (["--limit", "0"], "limit must be a whole number of at least 1, not 0"),
        (["--num_fewshot", "2", "-1"], "num_fewshot must be a whole number of at least 0, not -1"),
        (["--batch_size", "0"], "batch_size must be a whole number of at least 1, not 0"),
        (["--log_samples"], "log_samples needs a folder"),
        (["--output", ""], "is no name of a folder"),
        (["--output", "x" * 300], "cannot be a folder: File name too long"),
        (["--seed", "-1"], "seed=-1 must be between 0 and"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--include_path", "nowhere"], "include_path nowhere is not a folder"),
        (["--tokenizer", "./nowhere"], "there is no folder ./nowhere"),
    ],
)
@pytest.mark.usefixtures("few_tasks")
def test_a_bad_option_is_refused_in_one_line(
    options: list[str],
    message: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["evaluate", str(checkpoint), *options]) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize("place", ["./missing", "/missing/folder", "missing-name", "{tmp}/file", "{tmp}"])
def test_a_place_without_a_checkpoint_is_named(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place.format(tmp=tmp_path)
    if place.endswith("file"):
        Path(path).write_text("not a folder")
    assert main(["evaluate", path]) == 2
    assert_one_line(capsys, path)


def test_the_folder_of_a_run_leads_to_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["evaluate", str(tmp_path)]) == 2
    assert_one_line(capsys, f"has no config.json; the model of this run is in {tmp_path / 'model'}")


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dynattn")]
    assert len(lines) == 1
    assert message in lines[0]
    assert lines[0].startswith("dynattn evaluate: error: ")


def test_nothing_is_overwritten_unasked(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results({}, {}, {})
    path = write_results(results, tmp_path)
    before = path.read_bytes()
    (tmp_path / "samples.jsonl").write_text("old")
    assert main(["evaluate", str(checkpoint), "--output", str(tmp_path)]) == 2
    assert_one_line(capsys, "results.json exists; choose another --output or pass --overwrite")
    assert path.read_bytes() == before
    results.unavailable["sciq"] = "no network"
    write_results(results, tmp_path, overwrite=True)
    assert json.loads(path.read_text())["unavailable"] == {"sciq": "no network"}
    assert not (tmp_path / "samples.jsonl").exists()
    with pytest.raises(UserError, match="cannot write into"):
        write_results(results, path / "below")


def test_unknown_values_are_key_errors() -> None:
    with pytest.raises(KeyError, match="no value of 'acc' for task 'x'"):
        Results({}, {}, {}).value("x", "acc")
