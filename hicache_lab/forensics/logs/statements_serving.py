"""What a server says at work and in trouble, and what PyTorch, the kernel and a process listing say about it."""

from __future__ import annotations

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.statement import N, Pattern

_RETRACT = {
    "#retracted_reqs": "retracted__int",
    "#aborted_retracted_reqs": "aborted__int",
    "#new_tokens_gained": "tokens_gained__int",
}
_RATIO = rf"(?:.*?#new_token_ratio: (?P<ratio_from__float>{N}) -> (?P<ratio_to__float>{N}))?"
_KILLED = {
    "total-vm": "total_vm_bytes__kb",
    "anon-rss": "anon_rss_bytes__kb",
    "file-rss": "file_rss_bytes__kb",
    "shmem-rss": "shmem_rss_bytes__kb",
}

SERVING: tuple[Pattern, ...] = (
    # pressure on the device pool
    Pattern("retract.old", ev.Retraction, rf"Decode out of memory happened{_RATIO}", _RETRACT),
    Pattern(
        "retract",
        ev.Retraction,
        rf"(?:Testing retraction\. )?KV cache pool is full\. Retract requests{_RATIO}",
        _RETRACT,
        words=("KV", "Testing"),
    ),
    Pattern(
        "shortage",
        ev.TokenShortage,
        r"(?P<phase>Decode|Prefill) out of memory\. Try to lower your batch size"
        r"(?:(?:.|\n)*?Try to allocate (?P<requested__int>\d+) tokens)?(?:(?:.|\n)*?Ava[il]{2,3}able tokens: "
        r"(?P<available__int>\d+))?",
        words=("Decode", "Prefill"),
        lines=4,
    ),
    Pattern("shortage.last", ev.TokenShortage, r"Out of memory even after retracting", const={"phase": "last"}),
    Pattern(
        "shortage.start",
        ev.TokenShortage,
        r"(?:Not enough memory\. Please try to increase --mem-fraction-static|Loaded weights leave no GPU memory "
        r"for the KV cache)",
        const={"phase": "start"},
        words=("Not", "Loaded"),
    ),
    Pattern("queue_full", ev.RequestRejected, r"The request queue is full", const={"name": "queue_full"}),
    Pattern(
        "input_long",
        ev.RequestRejected,
        r"Input length \((?P<input_tokens__int>\d+) tokens\) exceeds the maximum allowed length "
        r"\((?P<max_tokens__int>\d+) tokens\)",
        const={"name": "input_long"},
    ),
    Pattern(
        "flush_refused",
        ev.RequestRejected,
        r"Cache not flushed because there are pending requests",
        {"#queue-req": "queue_req__int", "#running-req": "running_req__int"},
        {"name": "flush_refused"},
    ),
    # failures
    Pattern(
        "process_exception",
        ev.Failure,
        r"(?P<process>Scheduler|TokenizerManager|DetokenizerManager|DataParallelController) hit an exception",
        words=("Scheduler", "TokenizerManager", "DetokenizerManager", "DataParallelController"),
    ),
    Pattern(
        "watchdog",
        ev.Stall,
        rf"(?:(?P<process>\w+) )?[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<timeout_s__float>{N})(?:, "
        rf"self\.soft=(?P<soft__bool>\w+))?",
        const={"name": "watchdog"},
        words=("Watchdog", "*watchdog"),
    ),
    Pattern(
        "health",
        ev.Stall,
        r"Health check failed\. Server couldn't get a response from detokenizer for last (?P<timeout_s__float>\d+) "
        r"seconds",
        const={"name": "health_check"},
    ),
    Pattern("sigquit", ev.Stall, r"Received sigquit from a child process?", const={"name": "sigquit"}),
    Pattern(
        "dead",
        ev.ProcessDeath,
        r"Rank (?P<index__int>\d+) scheduler is dead(?:(?:.|\n)*?Exit code: (?P<exit_code__int>-?\d+))?",
    ),
    Pattern("exit_code", ev.ProcessDeath, r"Exit code: (?P<exit_code__int>-?\d+)\s*$"),
    Pattern(
        "died_at_start",
        ev.ProcessDeath,
        r"Rank (?P<index__int>\d+) scheduler died during initialization \(exit code: (?P<exit_code__int>-?\d+)\)",
    ),
    Pattern(
        "crashed",
        ev.ProcessDeath,
        r"Subprocess (?P<name>\S+) \(pid=(?P<pid__int>\d+)\) crashed with exit code (?P<exit_code__int>-?\d+)",
    ),
    Pattern(
        "gpu_oom",
        ev.GpuOom,
        r"(?:CUDA|HIP|XPU) out of memory\.(?: Tried to allocate (?P<tried_bytes__mixed>[\d.]+ [MG]iB))?"
        r"(?:(?:.|\n)*?GPU (?P<gpu__int>\d+) has a total capacity of (?P<total_bytes__mixed>[\d.]+ [MG]iB))?"
        r"(?:(?:.|\n)*?of which (?P<free_bytes__mixed>[\d.]+ [MG]iB) is free)?",
        words=("CUDA", "HIP", "XPU"),
        lines=1,
    ),
    Pattern(
        "nccl",
        ev.Stall,
        r"\[rank(?P<index__int>\d+)\]:\[E.*?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, "
        r"OpType=(?P<op>\w+)",
        {r"Timeout\(ms\)": "timeout_s__ms"},
        {"name": "nccl"},
    ),
    # the kernel, and process listings
    Pattern(
        "kernel_oom",
        ev.KernelOom,
        r"Out of memory: Kill(?:ed)? process (?P<pid__int>\d+),? \((?P<comm>[^)]*)\)",
        _KILLED,
    ),
    Pattern(
        "kernel_oom.cgroup",
        ev.KernelOom,
        r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid__int>\d+),? \((?P<comm>[^)]*)\)",
        _KILLED,
        {"cgroup": True},
    ),
    Pattern("defunct", ev.Defunct, r"\S+ +(?P<pid__int>\d+) .*\[(?P<comm>[^\]]+)\] <defunct>"),
    # requests
    Pattern(
        "request_stats",
        ev.RequestStats,
        r"Req ?Time ?Stats\(rid=(?P<rid>[^,)]+)",
        {
            "input[_ ]len": "input_len__int",
            "cached_input_len": "cached_input_len__int",
            "output[_ ]len": "output_len__int",
            "queue_duration": "queue_ms__float",
            "forward_duration": "forward_ms__float",
        },
        words=("Req", "ReqTimeStats"),
    ),
    Pattern(
        "access",
        ev.Access,
        r'INFO: +(?P<client>\S+) - "(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status__int>\d+)',
    ),
)
