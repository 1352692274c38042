"""Rebuild server.log, kernel.log and memory.csv of an incident folder from the facts in its incident.json.

No original survived. What is written here is reconstructed: the lines have the form that the release prints, the
amounts follow from the reported facts, and the clock, the pids and the pace are made up (see the folder's README).
Deterministic: the same facts give the same bytes.  python scripts/rebuild_incident.py data/incidents/NAME
"""

import csv
import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

from hicache_lab.base.units import GB, GIB, KIB
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.kv import KvRows

START = datetime(2026, 1, 20, 9, 14, 2)
BOOT_SECONDS = 86_400.0  # kernel time stamps count from the boot, a day earlier
PIN_GB_PER_SECOND = 2.5  # how fast one rank makes its pages resident
FIRST_PID = 4120
GPU_GIB, WEIGHTS_GIB, STATIC_FRACTION = 94.1, 72.7, 0.853
SAMPLE_SECONDS = 2
KILLS = 3
ADDRESS = "127.0.0.1"


class Story:
    """The facts, and the moments that follow from them."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "incident.json").read_text(encoding="utf-8"))
        self.facts = {name: fact["value"] for name, fact in raw["facts"].items()}
        self.ranks = range(self.facts["tp_size"])
        geometry = load_geometry("kimi-k2.5")
        launch = LaunchConfig(tp_size=self.facts["tp_size"], kv_cache_dtype=self.facts["kv_cache_dtype"])
        self.row = KvRows(launch, geometry, rules_for(self.facts["sglang_version"])).row(geometry.count("full"))
        self.base_gb = self.facts["host_ram_gb"] - self.facts["available_gb"]
        self.full_gb = self.facts["used_at_the_end_gb"]
        self.pools_gb = self.full_gb - self.base_gb - self.facts["overhead_gb"]
        self.allocating = START + timedelta(seconds=211)
        self.kills = self._kills()

    def _kills(self) -> list[tuple[datetime, int, float]]:
        """When the host is full, the rank that is killed, and what it held: the rest fill the gap, and so on."""
        alive, held, now, found = len(self.ranks), 0.0, self.allocating, []
        for rank in (3, 6, 1)[:KILLS]:
            pace = alive * PIN_GB_PER_SECOND
            seconds = (self.pools_gb - held * alive) / pace
            held += seconds * PIN_GB_PER_SECOND
            now += timedelta(seconds=seconds)
            found.append((now, rank, held))
            alive -= 1
        return found

    def used_gb(self, now: datetime) -> float:
        """Host memory in use: the server's own first, then the pools of the ranks that live, up to the end."""
        loading = min(1.0, max(0.0, (now - START).total_seconds() / 190))
        used = self.base_gb + loading * self.facts["overhead_gb"]
        last = self.kills[-1][0]
        pinned = (min(now, last + timedelta(seconds=1000)) - self.allocating).total_seconds() * PIN_GB_PER_SECOND
        alive = len(self.ranks) - sum(killed <= now for killed, _, _ in self.kills)
        return min(float(self.full_gb), used + max(0.0, pinned) * alive)


def stamp(now: datetime, rank: int | None = None) -> str:
    """The record prefix of 0.4.7 and later."""
    return f"[{now:%Y-%m-%d %H:%M:%S}]" if rank is None else f"[{now:%Y-%m-%d %H:%M:%S} TP{rank}]"


def server_log(story: Story) -> str:
    """What the launcher and eight ranks print on 0.5.8 until the workers are gone."""
    facts, tokens = story.facts, story.facts["device_tokens"]
    after_weights = GPU_GIB - WEIGHTS_GIB
    kv_gib = tokens * story.row / GIB
    lines = [f"{stamp(START)} {server_args(facts)}"]

    def everyone(seconds: float, text: str, skew: float = 0) -> None:
        # ranks answer in an order of their own
        for place, rank in enumerate((0, 4, 2, 1, 7, 3, 6, 5)):
            moment = START + timedelta(seconds=seconds + skew * place)
            lines.append(f"{stamp(moment, rank)} {text}")

    everyone(14, "Init torch distributed begin.")
    everyone(18, "Init torch distributed ends. mem usage=1.31 GB")
    everyone(19, f"Load weight begin. avail mem={GPU_GIB:.2f} GB")
    everyone(
        181,
        "Load weight end. type=KimiK25ForConditionalGeneration, dtype=torch.bfloat16, "
        f"avail mem={after_weights:.2f} GB, mem usage={WEIGHTS_GIB:.2f} GB.",
        skew=0.6,
    )
    everyone(188, "Using KV cache dtype: torch.bfloat16")
    everyone(189, f"KV Cache is allocated. #tokens: {tokens}, KV size: {kv_gib:.2f} GB", skew=0.1)
    everyone(190, f"Memory pool end. avail mem={after_weights - kv_gib:.2f} GB")
    everyone(
        191,
        "Capture cuda graph begin. This can take up to several minutes. "
        f"avail mem={after_weights - kv_gib - 0.4:.2f} GB",
    )
    everyone(
        209,
        f"Capture cuda graph end. Time elapsed: 17.82 s. mem usage=2.06 GB. "
        f"avail mem={after_weights - kv_gib - 2.46:.2f} GB.",
    )
    lines.append(
        f"{stamp(START + timedelta(seconds=210), 0)} max_total_num_tokens={tokens}, chunked_prefill_size=8192, "
        f"max_prefill_tokens=16384, max_running_requests=2048, context_len=262144, "
        f"available_gpu_mem={after_weights - kv_gib - 2.46:.2f} GB"
    )
    everyone(211, f"Allocating {facts['hicache_size_gb']:.2f} GB host memory for hierarchical KV cache.", skew=0.1)
    first_kill, _, _ = story.kills[0]
    lines += [
        f"{stamp(first_kill + timedelta(seconds=2))} Received sigquit from a child process. "
        "It usually means the child failed.",
        f"{stamp(first_kill + timedelta(seconds=3))} Rank {story.kills[0][1]} scheduler is dead. "
        "Please check if there are relevant logs.",
        f"{stamp(first_kill + timedelta(seconds=5))} Exit code: -9",
    ]
    return "\n".join(lines) + "\n"


def server_args(facts: dict[str, object]) -> str:
    """The arguments line, cut down to the fields that matter here."""
    fields = {
        "model_path": "moonshotai/Kimi-K2.5",
        "trust_remote_code": True,
        "host": ADDRESS,
        "port": 30000,
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "mem_fraction_static": STATIC_FRACTION,
        "page_size": facts["page_size"],
        "tp_size": facts["tp_size"],
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_size": facts["hicache_size_gb"],
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_backend": None,
    }
    return "server_args=ServerArgs(" + ", ".join(f"{name}={value!r}" for name, value in fields.items()) + ")"


def kernel_log(story: Story) -> str:
    """What the kernel writes when it kills, in the form of dmesg."""
    lines = []
    for moment, rank, held_gb in story.kills:
        second = BOOT_SECONDS + (moment - START).total_seconds()
        pid = FIRST_PID + rank
        anonymous, total = int((held_gb + 5) * GB / KIB), int((story.facts["hicache_size_gb"] + 60) * GB / KIB)
        task = f"task=sglang::schedul,pid={pid},uid=0"
        text = (
            "sglang::schedul invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE|__GFP_COMP|__GFP_ZERO), "
            "order=0, oom_score_adj=0",
            f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/,{task}",
            f"Out of memory: Killed process {pid} (sglang::schedul) total-vm:{total}kB, anon-rss:{anonymous}kB, "
            f"file-rss:412008kB, shmem-rss:131204kB, UID:0 pgtables:{anonymous // 500}kB oom_score_adj:0",
        )
        lines += [f"[{second + 0.0004 * number:13.6f}] {line}" for number, line in enumerate(text)]
    return "\n".join(lines) + "\n"


def memory_rows(story: Story) -> list[tuple[str, int, int, int, int]]:
    """One row every two seconds: time, total, used, free and available bytes."""
    rows, total = [], story.facts["host_ram_gb"] * GB
    end = story.kills[-1][0] + timedelta(seconds=40)
    # 439 used + 9 free of 449: what is neither is the kernel's own
    kernels_own = total - (story.full_gb + story.facts["free_at_the_end_gb"]) * GB
    now = START
    while now <= end:
        used = int(story.used_gb(now) * GB)
        free = total - used - kernels_own
        rows.append((now.isoformat(timespec="seconds"), total, used, free, total - used - kernels_own))
        now += timedelta(seconds=SAMPLE_SECONDS)
    return rows


def main(folder: Path) -> None:
    """Write the three files."""
    story = Story(folder)
    (folder / "server.log").write_text(server_log(story), encoding="utf-8")
    (folder / "kernel.log").write_text(kernel_log(story), encoding="utf-8")
    with (folder / "memory.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("time", "total_bytes", "used_bytes", "free_bytes", "available_bytes"))
        writer.writerows(memory_rows(story))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
