"""octavo plan and octavo advise, as a shell would see them."""

import inspect
import json

import pytest

from octavo.cli.plan import USED, plan
from octavo.planning import find_hardware, find_model
from octavo.planning.search import layouts

MODELS = ("llama-3-8b", "llama-3-70b", "deepseek-v3")
PLAN = ("plan", "--model", "llama-3-8b", "--gpus", 64)


@pytest.mark.long
def test_plan_as_json_and_compared(octavo, tmp_path):
    paths = []
    for hardware in ("h100", "b200"):
        result = octavo(*PLAN, "--hardware", hardware, "--tokens", "2T", "--price", "2.5/h", "--json")
        assert result.exit_code == 0
        record = json.loads(result.stdout)
        assert record["tokens"] == 2e12
        bf16 = record["options"][0]
        assert bf16["cost"] > 0
        assert sum(bf16["memory_gb_by_part"].values()) == pytest.approx(bf16["memory_gb"])
        paths.append(tmp_path / f"{hardware}.json")
        paths[-1].write_text(result.stdout)
        gpu_hours = bf16["days"] * 24 * 64
        assert bf16["cost"] == pytest.approx(gpu_hours * 2.5)
        assert bf16["days"] == pytest.approx(2e12 / (bf16["tokens_per_s_per_gpu"] * 64) / 86400)
    found = json.loads(octavo("plan", "--compare", *paths, "--json").stdout)
    records = [json.loads(path.read_text())["options"] for path in paths]
    for each in found:
        pair = [next(option for option in options if option["recipe"] == each["recipe"]) for options in records]
        for name in ("step_time_s", "days", "memory_gb"):
            assert each[name] == [option[name] for option in pair]
    assert all(each["step_time_s"][1] < each["step_time_s"][0] for each in found)
    table = octavo("plan", "--compare", *paths).stdout
    assert "times as fast" in table
    assert "llama-3-8b, 64 × h100" in table
    rates = [64 * options[0]["tokens_per_s_per_gpu"] for options in records]
    assert found[0]["times_as_fast"] == pytest.approx(rates[1] / rates[0])
    before, after = found[0]["step_time_s"]
    assert f"{before / after:.2f}" in next(line for line in table.splitlines() if " bf16 " in f" {line} ")


def test_plans_with_other_batches_are_compared_by_their_tokens(octavo, tmp_path):
    """Half the batch takes about half the time, and is not twice as fast."""
    small = ("plan", "--model", "smollm2-135m", "--gpus", 1, "--seq", 2048)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, batch in zip(paths, (256, 128), strict=True):
        path.write_text(octavo(*small, "--global-batch", batch, "--json").stdout)
    found = json.loads(octavo("plan", "--compare", *paths, "--json").stdout)[0]
    assert found["step_time_s"][0] > 1.8 * found["step_time_s"][1]
    assert found["times_as_fast"] == pytest.approx(1, abs=0.1)


def test_recipes_of_one_plan_alone_are_named(octavo, tmp_path):
    small = ("plan", "--model", "smollm2-135m", "--gpus", 1, "--seq", 512)
    paths = [tmp_path / "h100.json", tmp_path / "a100.json"]
    for path in paths:
        path.write_text(octavo(*small, "--hardware", path.stem, "--json").stdout)
    shown = octavo("plan", "--compare", *paths).stdout
    assert "In h100.json alone: tensorwise, delayed" in shown
    assert "In a100.json" not in shown


@pytest.mark.parametrize(
    "text", ["2.5", "2.5/h", "2.5/hour", "$2.5/hr", "2.50 $/h", "2.5 per GPU-hour", "2.5/GPU hour", "2.5 per hour"]
)
def test_a_price_is_of_an_hour(octavo, text):
    small = ("plan", "--model", "smollm2-135m", "--gpus", 1, "--seq", 512)
    assert json.loads(octavo(*small, "--price", text, "--json").stdout)["price"] == 2.5


TRAINING = {"--seq": 4096, "--global-batch": 64, "--tokens": "2T", "--price": 2}
TRAINING |= {"--report": "a.html", "--calibrate": "a.json"}
INFERENCE = {"--prompt": 512, "--load": 1000}
OF_MODELS = {"--model": "llama-3-8b", "--hardware": "b200", "--gpus": 16, "--framework": "megatron"}


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (("--rows", "rows.csv"), OF_MODELS | TRAINING | INFERENCE | {"--answer": 8}),
        (("--compare", "a.json", "b.json"), OF_MODELS | TRAINING | INFERENCE | {"--answer": 8, "--rows": "r.csv"}),
        (("--model", "llama-3-8b", "--answer", 64), TRAINING),
        (("--model", "llama-3-8b"), INFERENCE),
    ],
)
def test_an_option_without_effect_is_refused(octavo, task, options):
    for name, value in options.items():
        result = octavo("plan", *task, name, value)
        assert result.exit_code == 2, name
        assert (name in result.stderr) or "has no effect with --rows" in result.stderr
        assert "has no effect" in result.stderr
        assert result.stderr.count("error:") == 1


def test_every_option_is_of_some_task():
    options = set(inspect.signature(plan).parameters) - {"context", "as_json"}
    assert set.union(*map(set, USED.values())) == options


@pytest.mark.long
def test_the_table_shows_recomputation_and_the_cost_of_a_price(octavo):
    shown = octavo(*PLAN, "--price", 2).stdout
    record = json.loads(octavo(*PLAN, "--price", 2, "--json").stdout)["options"][0]
    line = next(line for line in shown.splitlines() if line.lstrip().startswith("bf16 "))
    share = f"{record['recomputed_blocks']:.0%}"
    assert (share if record["recomputed_blocks"] else record["recompute"]) in line
    assert f"{record['cost']:,.0f}" in shown
    assert "cost" not in octavo(*PLAN).stdout.split("Where the time goes")[0]


@pytest.mark.long
def test_tokens_have_units(octavo):
    records = {text: json.loads(octavo(*PLAN, "--tokens", text, "--json").stdout) for text in ("5M", "3B", "2T")}
    assert [record["tokens"] for record in records.values()] == [5e6, 3e9, 2e12]


def test_plan_shows_tables_and_writes_a_page(octavo, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    shown = octavo(*PLAN, "--report", page)
    assert shown.exit_code == 0, shown.output
    assert "Where the time goes" in shown.stdout
    assert "Use FP8 with recipe" in shown.stdout
    assert "published measurements" in shown.stdout
    html = page.read_text()
    assert "<h2>Answer" in html
    assert "Use FP8 with recipe" in html
    assert html.count('<div data-figure="') == 3
    assert all(
        f"<h2>{part}" in html for part in ("Layers in FP8, with delayed", "Memory of a GPU", "What backward keeps")
    )
    assert 'src="http' not in html


def test_a_page_that_cannot_be_written_is_refused_before_anything_is(octavo, tmp_path):
    """As octavo doctor --html refuses it; nothing is computed or left beside the folder."""
    for target, words in ((tmp_path, "is a folder; name a file"), (tmp_path / "no" / "a.html", "there is no folder")):
        result = octavo(*PLAN, "--report", target)
        assert result.exit_code == 2
        assert words in result.stderr
        assert "--report" in result.stderr
        assert result.stdout == ""
    assert list(tmp_path.parent.glob("*.js")) + list(tmp_path.iterdir()) == []


def test_help_says_of_which_peak_mfu_is_a_share(octavo):
    shown = " ".join(octavo("plan", "--help").stdout.split())
    assert "MFU is the model's FLOPs" in shown
    assert "share of the GPU's dense BF16 peak, in FP8 recipes too" in shown


def test_advice_offers_what_it_takes(octavo):
    """It is of trainings: no service, and no program that serves."""
    shown = " ".join(octavo("advise", "--help").stdout.split())
    assert "--answer" not in shown
    assert "megatron" in shown
    assert "vllm" not in shown
    assert "tensorrt" not in shown
    assert octavo("advise", "llama-3-8b", "--framework", "vllm").exit_code == 2


@pytest.mark.long
def test_the_program_that_trains_can_be_chosen(octavo):
    records = [json.loads(octavo(*PLAN, "--framework", name, "--json").stdout) for name in ("torchtitan", "jax")]
    assert [record["framework"] for record in records] == ["torchtitan", "jax"]
    assert records[0]["options"][0]["step_time_s"] != records[1]["options"][0]["step_time_s"]
    assert "with the costs of torchtitan" in octavo(*PLAN).stdout


def test_a_search_of_1024_gpus_tries_few_layouts():
    """Its time is that of its predictions, a few milliseconds each."""
    counts = {name: len(list(layouts(find_model(name), find_hardware("h100"), 1024, seq=8192))) for name in MODELS}
    assert all(20 < count < 400 for count in counts.values()), counts


def test_rows_are_predicted_as_one_list(octavo, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id,kind,model,hardware,gpus,metric\na,train,Llama-3-8B,H100,8,tokens_per_s\nb,train,?,H100,8,x\n")
    found = json.loads(octavo("plan", "--rows", path, "--json").stdout)
    assert [each["id"] for each in found] == ["a", "b"]
    assert set(found[0]) == {"id", "value", "low", "high", "bf16_value", "reason"}
    assert found[0]["reason"] is None
    assert found[1]["value"] is None
    assert "no shape is known" in octavo("plan", "--rows", path).stdout.replace("\n", " ")


def test_inference_is_planned_with_an_answer(octavo):
    arguments = ("plan", "--model", "llama-3-8b", "--gpus", 1, "--answer", 256, "--load", 20000)
    found = json.loads(octavo(*arguments, "--json").stdout)
    assert {point["precision"] for point in found["points"]} >= {"bf16", "int8", "fp8"}
    assert all(point["low"] < point["tokens_per_s"] < point["high"] for point in found["points"])
    prompts = {point["prompt"] for point in found["points"]}
    assert len(prompts) == 3
    assert max(prompts) == 16 * min(prompts)
    assert found["answer"].startswith("Serve in FP8: with 16 requests a token takes")
    shown = octavo(*arguments).stdout
    assert "ms a token" in shown
    assert "Less than the article's 50 ms: FP8, INT8, BF16." in found["answer"]
    assert "GPUs for the load, below 50 ms a token" in shown


def test_this_cpu_is_measured_and_runs_no_fp8(octavo):
    result = octavo("plan", "--model", "smollm2-135m", "--hardware", "cpu", "--gpus", 1, "--seq", 512, "--json")
    bf16, *others = json.loads(result.stdout)["options"]
    assert bf16["tokens_per_s_per_gpu"] > 0
    assert all("no FP8 units" in option["reason"] for option in others)


@pytest.fixture
def measured(tmp_path):
    """A result of benchmarks.hopper in which FP8 is as fast as the vendor's peak allows."""
    seconds = {"bf16, CUDA graph": [0.036], "tensorwise, CUDA graph": [0.0134]}
    section = {"title": "Linear, CUDA graph, forward and backward, 16384³", "raw": {"seconds": seconds}}
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"facts": {"device": "NVIDIA H100 80GB HBM3"}, "parts": [{"sections": [section]}]}))
    return path


def test_a_plan_has_the_answer_of_advise(octavo, monkeypatch, measured):
    """With every option that both have; each of the two last ones changes it."""
    monkeypatch.setattr("octavo.planning.advice.SIZES", ())
    monkeypatch.setattr("octavo.planning.advice.CONTEXTS", (2048, 2048))
    small = ("--hardware", "h100", "--gpus", 4, "--seq", 2048, "--json")
    answers = []
    for options in ((), ("--global-batch", 8), ("--calibrate", measured)):
        advice = json.loads(octavo("advise", "smollm2-135m", *small, *options).stdout)
        made = json.loads(octavo("plan", "--model", "smollm2-135m", *small, *options).stdout)
        assert advice.pop("calibration") == made["calibration"]
        assert made["answer"] == {name: value for name, value in advice.items() if name != "changes"}
        answers.append(made["answer"])
    assert answers[0]["use_fp8"] is False
    assert answers[1] != answers[0] != answers[2]


def test_a_calibrated_plan_says_so(octavo, monkeypatch, measured):
    """On the terminal, in JSON, in a comparison and on the page, and of which recipes."""
    monkeypatch.setattr("octavo.planning.advice.SIZES", ())
    monkeypatch.setattr("octavo.planning.advice.CONTEXTS", (2048, 2048))
    small = ("--gpus", 1, "--seq", 2048)
    words = "Calibrated with result.json: recipes bf16, tensorwise, delayed; the others are the fit's. Predicted from"
    page = measured.with_name("plan.html")
    assert words in octavo("plan", "--model", "smollm2-135m", *small, "--calibrate", measured, "--report", page).stdout
    assert words in octavo("advise", "smollm2-135m", *small, "--calibrate", measured).stdout
    assert words.replace("'", "&#39;") in page.read_text()
    paths = [measured.with_name(name) for name in ("fit.json", "own.json")]
    for path, options in zip(paths, ((), ("--calibrate", measured)), strict=True):
        path.write_text(octavo("plan", "--model", "smollm2-135m", *small, *options, "--json").stdout)
    assert [json.loads(path.read_text())["calibration"] for path in paths] == [
        None,
        {"file": "result.json", "recipes": ["bf16", "tensorwise", "delayed"]},
    ]
    shown = " ".join(octavo("plan", "--compare", *paths).stdout.split())
    assert "fit.json (smollm2-135m, 1 × h100) → own.json (smollm2-135m, 1 × h100, calibrated with result.json)" in shown


@pytest.mark.parametrize(
    ("hardware", "tolerance", "words"),
    [
        ("a100", 3, "With h100 or b200 in its place, FP8 would not be advised either."),
        ("h100", 0.1, "With a tolerance of 0.5 % FP8 would not be advised either; with 0.1 %, it never is."),
        ("h100", 3, "Nothing that was tried, and fits into memory, changes it: GPUs, context, model, hardware, tol"),
    ],
)
def test_advice_that_nothing_changes_says_what_was_tried(octavo, monkeypatch, hardware, tolerance, words):
    monkeypatch.setattr("octavo.planning.advice.SIZES", ())
    monkeypatch.setattr("octavo.planning.advice.CONTEXTS", (512, 512))
    small = ("smollm2-135m", "--gpus", 1, "--seq", 512)
    shown = octavo("advise", *small, "--hardware", hardware, "--tolerance", tolerance).stdout
    assert words in shown
    assert ("Nothing that was tried" in shown) == words.startswith("Nothing")


def test_one_reason_is_printed_once_for_all_recipes_that_it_refuses(octavo):
    shown = octavo("plan", "--model", "smollm2-135m", "--hardware", "a100", "--gpus", 1, "--seq", 512).stdout
    assert "tensorwise, delayed, rowwise, rowwise_hp_grad_weight, blockwise, mxfp8: a100 has no FP8 units" in shown


@pytest.mark.long
def test_advice(octavo):
    assert octavo("advise", "llama-3-70b", "--gpus", 256).stdout.startswith("Use FP8")
    refused = json.loads(octavo("advise", "llama-3-8b", "--hardware", "a100", "--json").stdout)
    assert refused["use_fp8"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "name a model"),
        (("plan", "--model", "unheard"), "no shape is known"),
        (("plan", "--model", "llama-3-8b", "--hardware", "abacus"), "no figures are known"),
        (("plan", "--model", "llama-3-8b", "--tokens", "many"), "is not a number"),
        (("plan", "--model", "llama-3-405b", "--gpus", 8), "use more GPUs"),
        (("plan", "--model", "llama-3-8b", "--gpus", 0), "gpus and seq must be 1 to 1,000,000,000"),
        ((*PLAN, "--gpus", 10**330), "gpus and seq must be 1 to 1,000,000,000"),
        ((*PLAN, "--answer", 8, "--prompt", 10**330), "gpus, prompt and answer must be 1 to 1,000,000,000"),
        (("plan", "--rows", "nowhere.csv"), "nowhere.csv"),
        (("plan", "--rows", "a.csv", "--compare", "b.json", "c.json"), "--compare has no effect with --rows"),
        (("plan", "--model", ""), "the model's name is empty"),
        (("plan", "--model", "./nowhere"), "there is no folder './nowhere'"),
        (("plan", "--model", "llama-3-70b", "--gpus", 1, "--answer", 8), "fp8, FP8 cache does not fit into 1 × 80 GB"),
        (("plan", "--model", "llama-3-70b", "--gpus", 1, "--answer", 8, "--hardware", "a100"), "int8 does not fit"),
        ((*PLAN, "--answer", 0), "answer must be 1 to"),
        ((*PLAN, "--price", "cheap"), "is not a number"),
        ((*PLAN, "--report", "nowhere/plan.html"), "there is no folder 'nowhere'"),
        (("plan", "--model", "llama-3-8b", "--answer", 128, "--load", "nan"), "load between"),
        (("plan", "--model", "llama-3-8b", "--answer", 128, "--load", "inf"), "load between"),
        (("plan", "--model", "llama-3-8b", "--framework", "vllm"), "does not train"),
        (("plan", "--model", "llama-3-8b", "--answer", 64, "--framework", "jax"), "trains and does not serve"),
        (("plan", "--model", "vit-b", "--answer", 64), "vit-b is an encoder and generates no tokens"),
        (("plan", "--model", "llama-3-8b", "--answer", 64, "--gpus", 3), "do not divide among 3 GPUs"),
        (("advise", "llama-3-8b", "--tolerance", "nan"), "tolerance must be"),
        (("advise", "llama-3-8b", "--global-batch", -1), "global-batch times seq 0 to 1,000,000,000,000,000"),
        (("advise", "llama-3-8b", "--gpus", 64, "--global-batch", 7), "does not divide among 64 GPUs"),
        (("advise", "llama-3-8b", "--calibrate", "nowhere.json"), "nowhere.json"),
        (("advise", "llama-3-8b", "--tolerance", -1), "tolerance must be"),
    ],
)
def test_bad_input_ends_in_one_sentence(octavo, arguments, words):
    result = octavo(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("error:") == 1
