"""Make .venv and install hicache_lab into it, once; say plainly what is missing when that cannot work.

Only the standard library, and no syntax newer than Python 3.5: an old interpreter must reach its message.
Used by the Makefile: ``python scripts/bootstrap.py lab|dev``.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 11)
# what each set of packages was measured to take, with pip's own unpacking on top
NEEDED_GB = {"lab": 2.0, "dev": 2.5}
EXTRAS = {"lab": "", "dev": "[dev]"}
DISK_FULL = re.compile(r"No space left on device|Errno 28|Disk quota exceeded")
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Network is unreachable|ProxyError|"
    r"Temporary failure in name resolution|Connection refused|Connection reset|SSLError|from versions: none"
)


def main(kind):
    """Install ``kind`` (lab, or dev which holds it) unless this very state is installed already."""
    version = sys.version_info[:2]
    if version < OLDEST:
        return fail(
            "this is Python {}.{} ({}); hicache_lab needs 3.11 or newer".format(version[0], version[1], sys.executable),
            "install a newer one, or name it: make PYTHON=/path/to/python3.12",
        )
    wanted = fingerprint()
    if any(read(stamp(name)) == wanted for name in EXTRAS if NEEDED_GB[name] >= NEEDED_GB[kind]):
        return 0
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < NEEDED_GB[kind]:
        return fail(
            "the disk is too full: {:.1f} GB free in {}, about {} GB needed".format(free_gb, ROOT, NEEDED_GB[kind]),
            "free space, or put the checkout on another disk",
        )
    return make_venv() or install(kind) or write(stamp(kind), wanted)


def fingerprint():
    """What decides whether the installed packages are still the wanted ones."""
    digest = hashlib.sha256(platform.python_version().encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((read(os.path.join(ROOT, name)) or "").encode())
    # a checkout that was moved needs its scripts and its link anew
    digest.update(ROOT.encode())
    return digest.hexdigest()


def stamp(kind):
    """The file that remembers what was installed."""
    return os.path.join(VENV, ".installed-" + kind)


def make_venv():
    """Create .venv; 0 when it is there."""
    python = os.path.join(VENV, "bin", "python")
    if os.path.exists(python) and subprocess.call([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL) == 0:
        return 0
    say("making {} with {}".format(VENV, sys.executable))
    if subprocess.call([sys.executable, "-m", "venv", "--clear", VENV]) == 0:
        return 0
    return fail(
        "{} cannot make a virtual environment".format(sys.executable),
        "on Debian and Ubuntu install python{}.{}-venv; elsewhere a Python with venv and ensurepip".format(
            *sys.version_info[:2]
        ),
    )


def install(kind):
    """pip install the checkout, editable, with the pinned set; the whole story goes into a log."""
    say("installing the {} packages (one minute to a few, once)".format(kind))
    command = [
        os.path.join(VENV, "bin", "python"), "-m", "pip", "install", "--no-input",
        "--disable-pip-version-check", "--constraint", os.path.join(ROOT, "constraints.txt"),
        "--editable", ROOT + EXTRAS[kind],
    ]  # fmt: skip
    log = os.path.join(VENV, "install.log")
    said = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    ) as pip, open(log, "w", encoding="utf-8") as file:  # fmt: skip
        for line in pip.stdout:
            said.append(line)
            file.write(line)
            show_progress(said)
    if pip.returncode == 0:
        return 0
    sys.stderr.write("".join(line for line in said if line.startswith("ERROR")))
    text = "".join(said)
    if DISK_FULL.search(text):
        return fail("the disk is full", "free about {} GB and run make again".format(NEEDED_GB[kind]))
    if NO_NETWORK.search(text):
        return fail(
            "the package index cannot be reached",
            "check the network, or HTTPS_PROXY and pip's index-url; then run make again (log: {})".format(log),
        )
    return fail(
        "pip could not install the packages; its whole story is in {}".format(log),
        "mend that, run make again",
    )


def show_progress(said):
    """A counter on a terminal, one line for the last and longest step elsewhere."""
    line = said[-1]
    if line.startswith("Installing collected packages"):
        say("{} packages fetched, unpacking them".format(line.count(",") + 1))
    elif line.startswith("Collecting ") and sys.stdout.isatty():
        count = sum(one.startswith("Collecting ") for one in said)
        sys.stdout.write("  {:3d} {:<40.40}\r".format(count, line.split()[1]))
        sys.stdout.flush()


def read(path):
    """A file's text, or None."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def write(path, text):
    """Write a small file; 0 as everything here that went well."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return 0


def say(text):
    """One line for the person who typed make."""
    print("hicache_lab: " + text)
    sys.stdout.flush()


def fail(problem, remedy):
    """Name the problem and what to do; 1."""
    sys.stderr.write("hicache_lab: {}\n  {}\n".format(problem, remedy))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if sys.argv[1:] else "lab"))
