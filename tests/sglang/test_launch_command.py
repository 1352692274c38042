"""What people paste: where the launch is, and what is not one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.launch import parse_launch, parse_launches, render_launch

KIMI = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8"

PROGRAMS = [
    "python -m sglang.launch_server --model-path m",
    "python3 -u -m sglang.launch_server --model m",
    "/opt/venv/bin/python3.12 -m sglang.launch_server --model-path=m",
    "python3 /opt/sglang/python/sglang/launch_server.py --model-path m",
    "sglang serve m",
    "/usr/local/bin/sglang serve --model-path m",
    "nohup numactl --interleave=all python -m sglang.launch_server --model-path m > server.log 2>&1 &",
    "CUDA_VISIBLE_DEVICES=0,1 python -m sglang.launch_server --model-path m &> log &",
    "cd /work && source venv/bin/activate && python -m sglang.launch_server --model-path m | tee log",
    "$ python -m sglang.launch_server --model-path m",
    "(venv) $ python -m sglang.launch_server --model-path m",
    "user@node-1:~/run$ python -m sglang.launch_server --model-path m",
    "root@node:/# python -m sglang.launch_server --model-path m",
    "PS C:\\Users\\me> python -m sglang.launch_server --model-path m",
    "```bash\npython -m sglang.launch_server --model-path m\n```",
    "# start it\npython -m sglang.launch_server --model-path m  # the model",
    "srun -N1 bash -lc 'python -m sglang.launch_server --model-path m'",
    "ssh node1 \"nohup sh -c 'python -m sglang.launch_server --model-path m' &\"",
    "if true; then python -m sglang.launch_server --model-path m; fi",
    "python -m dynamo.sglang --model-path m",
    'CMD ["python3", "-m", "sglang.launch_server", "--model-path", "m"]',
    "python -m sglang.launch_server --model-path m > >(tee log) 2> \"$ERR\" <<< 'x y' |& cat",
    "python -m sglang.launch_server \\\n --model-path m \\\n > $LOG",
    "cat > c.yaml <<EOF\n--tp: 'x\nEOF\npython -m sglang.launch_server --model-path m",
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_a_launch_is_found_in(text: str) -> None:
    config = parse_launch(text)
    assert config.model == "m"
    assert [name for name, _ in config.given()] == ["model"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no SGLang launch found"),
        ("python train.py --tp 8", "no SGLang launch found"),
        ("python -m sglang.bench_serving --model m", "no SGLang launch found"),
        ("vllm serve m --tensor-parallel-size 8", "launches vllm, not SGLang"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "not SGLang"),
        (
            f"{KIMI} --hicache-size 300GB",
            "--hicache-size: expected a whole number of GB .* per rank .*'300GB'",
        ),
        (f"{KIMI} --tp eight", "--tp: expected a whole number, got 'eight'"),
        (f"{KIMI} --hicache-ratio two", "--hicache-ratio: expected a finite number, got 'two'"),
        (f"{KIMI} --hicache-ratio nan", "--hicache-ratio: expected a finite number"),
        (f"{KIMI} --hicache-size", "--hicache-size: expected a value, got nothing"),
        (f"{KIMI} --hicache-size --page-size 1", "--hicache-size: expected a value, got nothing"),
        (
            f"{KIMI} --enable-hierarchical-cache 48",
            "'48' after --enable-hierarchical-cache belongs to no option",
        ),
        (f"{KIMI} --enable-hierarchical-cache=true", "is a switch and takes no value"),
        (f"{KIMI} --hicache-storage-prefetch-r 4", "ambiguous.*max-attempts.*poll-interval"),
        (f"{KIMI} --hicache-size $SIZE", "--hicache-size: .*SIZE, to which this text gives no value"),
        (f"{KIMI} --hicache-size $(nproc)", r"--hicache-size: \$\(nproc\)"),
        (f"{KIMI} $EXTRA", "EXTRA, to which this text gives no value"),
        (f'{KIMI} "${{EXTRA[@]}}"', "EXTRA"),
        (f"{KIMI} '--page-size", "line 1: the quote ' is never closed"),
        (f'{KIMI} \n"--page-size', 'line 2: the quote " is never closed'),
        (f"{KIMI} \u2013\u2013hicache-size 48", "typographic dash"),
        (f"{KIMI} -hicache-size 48", "-hicache-size: the server knows no option with one hyphen"),
        ("x" * 1_000_001, "1,000,001 characters"),
        (f"{KIMI} \\\n  # --page-size 64 \\\n  --hicache-size 48", "line 3: --hicache-size stands alone"),
        (f"{KIMI}\n  --hicache-size 48", "line 2: --hicache-size stands alone"),
        (f"{KIMI} \\ --page-size 64", "after --tp-size: a backslash before a blank does not continue"),
        (f"{KIMI}\n{KIMI} --hicache-size 1", "2 different SGLang launches"),
        ("services: {a: {command: [", "line [12]: not YAML"),
        ("command: {{ .Values.x }}\n- a", "Helm template"),
    ],
)
def test_a_bad_paste_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_launch(text)


def test_an_unreplaced_variable_among_words_is_named() -> None:
    with pytest.raises(UsageError, match=r"--tp: .*'\$TP', a variable that nothing has replaced"):
        parse_launch(["sglang", "serve", "m", "--tp", "$TP"])


def test_the_same_launch_twice_is_one() -> None:
    assert parse_launch(f"{KIMI}\n{KIMI}").tp_size == 8
    assert len(parse_launches(f"{KIMI}\n{KIMI} --page-size 64")) == 2


def test_variables_from_outside() -> None:
    assert parse_launch("sglang serve m --tp $TP", variables={"TP": "4"}).tp_size == 4


def test_what_no_size_depends_on_may_stay_a_variable() -> None:
    config = parse_launch(f"{KIMI} --host $POD_IP --port ${{PORT}} --node-rank $RANK")
    assert config.host is None
    assert dict(config.other)["--host"] == "$POD_IP"
    assert render_launch(config).endswith("--host $POD_IP --port ${PORT} --node-rank $RANK")
    assert parse_launch(render_launch(config)) == config


@given(st.text(max_size=200))
def test_any_paste_is_a_launch_or_a_clear_refusal(text: str) -> None:
    try:
        parse_launch("python -m sglang.launch_server --model-path m " + text)
    except UsageError as error:
        assert str(error)
