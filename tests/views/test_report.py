"""The written postmortem: complete, escaped, offline, and for any incident folder."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.markdown import escape_markdown, printable_text
from hicache_lab.base.resources import data_dir
from hicache_lab.cli import main
from hicache_lab.views.report import postmortem, to_document, write_report
from hicache_lab.views.report.document import Document

SEED = "kimi-k25-hicache-300"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "logs"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("seed")
    markdown, page = write_report(to_document(postmortem(SEED)), folder)
    assert not list(folder.glob("*.part"))
    return markdown.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")


def test_seed_postmortem_has_every_section(seed: tuple[str, str]) -> None:
    markdown, page = seed
    sections = [line[3:] for line in markdown.splitlines() if line.startswith("## ")]
    assert sections == [
        "Summary", "Impact", "Timeline", "Root cause", "Evidence", "Contributing factors and consequences",
        "What would have caught it", "Action items", "What is not known",
    ]  # fmt: skip
    for text in (
        "8 × 300 GB = 2,400.00 GB",
        "server.log:75",
        "kernel.log:3",
        "reconstructed",
        "hicache-lab preflight --sglang-version 0.5.8 --host-ram 449GB",
        "OOM_RISK",
        "--hicache-size 43",
        "--kv-cache-dtype fp8_e4m3",
        "✎",
    ):
        assert text in markdown, text
    assert "2,400.00 GB" in Page(page).text


def test_preflight_line_of_the_postmortem_gives_its_verdict(
    seed: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    block = seed[0].split("hicache-lab preflight --sglang", 1)[1].split("```", 1)[0]
    words = shlex.split(("hicache-lab preflight --sglang" + block).replace("\\\n", " "))
    assert main(words[1:]) == 3
    assert capsys.readouterr().out.startswith("OOM_RISK")


def test_html_fetches_nothing(seed: tuple[str, str]) -> None:
    page = Page(seed[1])
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            assert not (attributes.get(name) or "").startswith(("http", "//", "file")), (tag, attributes)
        assert tag not in ("link", "iframe", "object", "embed", "base")
    assert sum(tag == "script" for tag, _ in page.tags) >= 2
    assert "Plotly.newPlot" in seed[1]


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> [x](javascript:alert(1)) ```\n# not a heading\n"


def hostile_log(tmp_path: Path) -> Path:
    log = tmp_path / "server.log"
    payload = HOSTILE.replace("\n", " ")
    log.write_text(
        f"[2026-01-02 03:04:00] server_args=ServerArgs(model_path='{payload}', tp_size=2, hicache_size=300, "
        f"api_key='sk-secret')\n"
        f"[2026-01-02 03:04:05 TP0] Allocating 300.00 GB host memory for hierarchical KV cache.\n"
        f"[2026-01-02 03:04:06 TP0] Scheduler hit an exception: Traceback (most recent call last):\nValueError: "
        f"{payload}\n"
        f"[2026-01-02 03:04:07] Subprocess {payload.split()[0]} (pid=1) crashed with exit code -9. Triggering "
        f"SIGQUIT for cleanup...\n"
    )
    return log


def test_hostile_log_stays_text(tmp_path: Path) -> None:
    post = postmortem(hostile_log(tmp_path), title=HOSTILE, host_ram_bytes=449 * 10**9)
    markdown, page = write_report(to_document(post), tmp_path / "out")
    parsed = Page(page.read_text(encoding="utf-8"))
    assert not [tag for tag, _ in parsed.tags if tag in ("img", "a")]
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert "alert(1)</script><img" not in page.read_text(encoding="utf-8")
    assert "sk-secret" not in page.read_text(encoding="utf-8") + markdown.read_text(encoding="utf-8")
    outside = []
    fence = ""
    for line in markdown.read_text(encoding="utf-8").splitlines():
        mark = line[: len(line) - len(line.lstrip("`"))]
        if not fence and len(mark) >= 3:
            fence = mark
        elif fence and line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    assert fence == ""
    assert not any("<script" in line.replace("\\<", "") for line in outside)
    assert "# not a heading" not in outside


@given(st.text(max_size=80))
@example("1.")
@example("- -  -")
@example("2) [x](javascript:y) <b> `c` | d\\| www.e.f _g_ ---")
@settings(max_examples=200, deadline=None)
def test_any_text_is_shown_and_never_markup(text: str) -> None:
    document = Document("")
    document.heading(text)
    document.paragraph(text)
    document.bullets([text])
    document.table((text,), ((text,),))
    document.code(text)
    page = Page(document.to_html())
    allowed = set("html head meta title style body h1 h2 p ul li table thead tbody tr th td pre code".split())
    assert {tag for tag, _ in page.tags} <= allowed
    assert page.text.split() == 6 * printable_text(text).split()
    escaped = escape_markdown(text)
    assert "\n" not in escaped
    for char in "<[`|":
        assert escaped.count("\\" + char) >= text.count(char)


def test_own_incident_folder_with_and_without_json(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(FIXTURES / "0.5.10-guard-tp2-size6-touched.server.log", plain / "server.log")
    shutil.copy(FIXTURES / "0.5.10-guard-tp2-size6-touched.memory.csv", plain / "memory.csv")
    post = postmortem(plain)
    assert post.origin == "measured"
    assert post.diagnosis.first is not None
    assert post.diagnosis.first.confidence == "high"
    assert post.why_no_answer
    assert post.why_no_answer in to_document(post).to_markdown().replace("\\", "")

    copied = tmp_path / "copy"
    shutil.copytree(data_dir() / "incidents" / SEED, copied)
    raw = json.loads((copied / "incident.json").read_text(encoding="utf-8"))
    raw["title"] = "Another"
    (copied / "incident.json").write_text(json.dumps(raw), encoding="utf-8")
    assert to_document(postmortem(copied)).title == "Another"


def test_clean_log_gives_no_finding_and_says_what_was_checked() -> None:
    text = to_document(postmortem(FIXTURES / "0.5.23-llama-tp2-hicache.server.log")).to_markdown()
    assert "No cause was found" in text
    assert "staggered_refusal" in text


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Mars"):
        postmortem(SEED, timezone="Mars/Olympus")
    with pytest.raises(InputError, match=r"no incident\.json"):
        postmortem(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no server log"):
        postmortem(tmp_path / "empty")


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", SEED, "--output", str(tmp_path / "out"), "--timezone", "Europe/Berlin"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == ["postmortem.md", "postmortem.html"]
    assert "Europe/Berlin" in (tmp_path / "out" / "postmortem.md").read_text(encoding="utf-8")


def test_report_of_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "schema": "hicache-lab/run", "schema_version": 1, "notebook": "x", "notebook_sha256": "0", "status": "complete",
        "parameters": {"a": 1}, "given": ["a"], "started_at": "2026-01-02T03:04:05+00:00", "seconds": 1.5,
        "hicache_lab": "0.1.0",
        "python": "3.11", "error": None, "files": ["x.ipynb"],
        "figures": {
            "host_gb": {"value": 2400.0, "unit": "GB", "source": "computed"},
            "rows": {"value": [{"x": 1}, {"x": 2}], "unit": "rows", "source": "computed"},
        },
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(record))
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "host_gb" in text
    assert "2,400" in text
    capsys.readouterr()


def test_times_of_several_days_carry_their_date(tmp_path: Path) -> None:
    text = (data_dir() / "incidents" / "kimi-k25-hicache-300" / "server.log").read_text(encoding="utf-8")
    (tmp_path / "server.log").write_text(text + text.replace("2026-01-20", "2026-01-21"), encoding="utf-8")
    markdown = to_document(postmortem(tmp_path / "server.log")).to_markdown()
    assert "| 2026-01-20 09:14:02 | server | launch" in markdown
    assert "| 2026-01-21 09:14:02 | server | launch" in markdown
    assert "| when | 2026-01-20 09:14:02 – 2026-01-21 09:17:55 (UTC, as printed) |" in markdown


def test_a_healthy_server_has_an_outcome_and_a_risk_and_no_root_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    at = "[2026-01-02 03:04:{:02d}{}] "
    args = "server_args=ServerArgs(model_path='kimi-k2.5', tp_size=2, hicache_size=300, enable_hierarchical_cache=True)"
    pool = "Allocating 300.00 GB host memory for hierarchical KV cache."
    lines = [at.format(0, "") + args, *(at.format(5, f" TP{n}") + pool for n in range(2))]
    lines.append(at.format(9, "") + "The server is fired up and ready to roll!")
    log.write_text("\n".join(lines) + "\n")
    facts = ["--host-ram", "449GB", "--available", "445GB", "--sglang-version", "0.5.8"]
    assert main(["diagnose", str(log), *facts]) == 3
    assert capsys.readouterr().out.startswith("nothing failed in these files; what follows are risks")
    markdown = to_document(postmortem(log, host_ram_bytes=449 * 10**9, release="0.5.8")).to_markdown()
    assert "| outcome | ready; the log ends while it runs, and nothing failed in it |" in markdown
    assert "| risk | per\\_rank\\_size" in markdown or "| risk | per_rank_size" in markdown
    assert "| root cause |" not in markdown
    log.write_text("\n".join([*lines, at.format(20, "") + "Rank 1 scheduler is dead. Exit code: -9"]) + "\n")
    markdown = to_document(postmortem(log, host_ram_bytes=449 * 10**9, release="0.5.8")).to_markdown()
    assert "| outcome | 1 process(es) killed |" in markdown
    assert "| root cause |" in markdown
