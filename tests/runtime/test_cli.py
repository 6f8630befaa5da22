"""The command line: exit codes, messages, the JSON line."""

import json
import subprocess
import sys

import pytest

from dayzero.runtime import cli


@pytest.fixture
def runtime(monkeypatch, capsys):
    """runtime("train", ...) -> (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["runtime", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def train(tiny_run, run, *more):
    settings = [word for setting in tiny_run.settings for word in ("--set", setting)]
    return ("train", tiny_run.package, "--data", tiny_run.data, "--run", run, *settings, *more)


def test_the_last_line_of_a_run_is_its_summary(runtime, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    more = ("--eval-data", tiny_run.eval_data, "--set", "train.steps=2", "--json")
    code, out, _ = runtime(*train(tiny_run, tmp_path / "run", *more))
    assert code == 0
    summary = json.loads(out.splitlines()[-1])
    losses = ["loss_first", "loss_last", "eval_first", "eval_last"]
    assert list(summary) == ["command", "ok", "run", "steps", "skipped", *losses, "tokens_per_s", "peak_bytes"]
    assert (summary["command"], summary["ok"], summary["steps"], summary["skipped"]) == ("train", True, 2, 0)
    assert summary["run"] == str(tmp_path / "run")
    assert summary["eval_last"] != summary["eval_first"]
    assert out.count("step 2/2") == 2  # training and held-out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["train"]["steps"] == 2
    assert (record["package"], record["checkpoint"]) == (str(tiny_run.package), str(tiny_run.checkpoint))

    code, out, _ = runtime("export", tmp_path / "run", "-o", tmp_path / "adapter", "--adapter", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["kind"] == "adapter"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "train.step=3"], "unknown setting"),
        (["--set", "train.steps=none"], "train.steps"),
        (["--nproc", "4", "--set", "parallel.ep=4"], "6 experts"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--nproc", "0"], "--nproc"),
    ],
)
def test_bad_input_is_exit_code_2_without_a_traceback(more, says, runtime, tiny_run, tmp_path):
    code, _, err = runtime(*train(tiny_run, tmp_path / "run", *more))
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_a_file(runtime, tiny_run, tmp_path):
    (tmp_path / "run").write_text("mine")
    code, _, err = runtime(*train(tiny_run, tmp_path / "run"))
    assert (code, err) == (
        2,
        f"error: {tmp_path / 'run'}\n  found     a file\n  expected  a folder, or none yet\n  Choose another --run.\n",
    )
    assert (tmp_path / "run").read_text() == "mine"


def test_a_full_disk_names_the_file_that_has_no_room(runtime, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "source/model.safetensors", None, "out/model.safetensors")

    monkeypatch.setattr("dayzero.runtime.export.export", full)
    code, _, err = runtime("export", tmp_path, "-o", tmp_path / "out")
    assert code == 2
    assert err.splitlines()[:2] == ["error: out/model.safetensors", "  found     No space left on device"]


def test_an_interruption_is_said(runtime, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dayzero.runtime.export.export", interrupted)
    code, _, err = runtime("export", tmp_path, "-o", tmp_path / "out")
    assert (code, err.strip()) == (130, "interrupted")


def test_a_bad_line_of_the_data_is_named(runtime, tiny_run, tmp_path):
    lines = tiny_run.data.read_text().splitlines()
    lines[16] = lines[16][:-9]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    more = ("--data", tmp_path / "bad.jsonl", "--json")
    code, out, err = runtime(*train(tiny_run, tmp_path / "run", *more))
    assert code == 2
    assert err.startswith(f"error: {tmp_path}/bad.jsonl:17\n  found     not JSON")
    failure = json.loads(out.splitlines()[-1])
    assert (failure["command"], failure["ok"]) == ("train", False)
    assert "bad.jsonl:17" in failure["error"]


def test_resume_needs_a_run(runtime, tiny_run):
    code, _, err = runtime("train", tiny_run.package, "--data", tiny_run.data, "--resume")
    assert code == 2
    assert "--run DIR" in err


def test_no_data(runtime, tiny_run, tmp_path):
    code, _, err = runtime("train", tiny_run.package, "--run", tmp_path / "run")
    assert code == 2
    assert err.startswith("error: --data")


def test_kernels_lists_every_backend_and_one_choice_each(runtime):
    code, out, _ = runtime("kernels", "--json")
    assert code == 0
    rows = json.loads(out.splitlines()[-1])["operators"]
    chosen = [row["operator"] for row in rows if row["chosen"]]
    assert sorted(chosen) == sorted({row["operator"] for row in rows})
    assert all(row["reason"] for row in rows if not row["ok"])
    assert "chosen" in runtime("kernels")[1]


def test_plan(runtime, tiny_run):
    code, out, _ = runtime("plan", tiny_run.package, "--devices", "128", "--hbm", "64", "--json")
    assert code == 0
    plan = json.loads(out.splitlines()[-1])
    assert plan["devices"] == 128
    assert runtime("plan", tiny_run.package, "--devices", "128")[0] == 0


@pytest.mark.slow
def test_starting_the_command_imports_nothing_heavy():
    heavy = ("transformers", "langchain", "triton", "datasets", "tensorboard", "torch")
    code = f"import sys, dayzero.runtime.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    code = "import sys, dayzero.runtime.train, dayzero.runtime.job; print([n for n in {heavy} if n in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code.replace("{heavy}", str(heavy[:5]))], capture_output=True, text=True
    )
    assert out.stdout == "[]\n"
