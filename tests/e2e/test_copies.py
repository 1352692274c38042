"""The host↔device copies, byte for byte, in the server's own interpreter; and what stands in for GPU packages."""

import subprocess

import pytest

from hicache_lab.base.resources import data_dir
from hicache_lab.serving import cpu_server

STUBS = data_dir() / "cpu_server" / "stubs"
HEAD = "import os, sys; sys.path.insert(0, os.environ['STUBS'])\n"

ROUND_TRIPS = """
import torch, itertools
from sgl_kernel import kvcacheio as io
torch.manual_seed(0)
L, H, D, P, PAGES = 3, 4, 8, 4, 6
N = P * PAGES
device = [torch.randint(0, 255, (N, H, D), dtype=torch.uint8) for _ in range(2 * L)]
K, V = device[:L], device[L:]
table = lambda layers: torch.tensor([x.data_ptr() for x in layers], dtype=torch.uint64)
item = H * D
pages = torch.randperm(PAGES)[:3]
here = torch.cat([torch.arange(p * P, p * P + P) for p in pages.tolist()])
there = torch.cat([torch.arange(p * P, p * P + P) for p in torch.randperm(PAGES)[:3].tolist()])
NO = os.environ.get("HICACHE_LAB_NO_COPY") == "1"

def check(name, token_at, back):
    "token_at(which, layer, slot): where SGLang's own layout says the token lies; back(layer, k, v): load one layer"
    for which, layers in ((0, K), (1, V)):
        for l, (a, b) in itertools.product(range(L), zip(here.tolist(), there.tolist())):
            same = torch.equal(token_at(which, l, b), layers[l][a])
            assert same != NO, (name, which, l, a, b)
    for l in range(L):
        k, v = torch.zeros_like(K[l]), torch.zeros_like(V[l])
        back(l, k, v)
        assert torch.equal(k[here], K[l][here]) != NO and torch.equal(v[here], V[l][here]) != NO, (name, l)
        untouched = [i for i in range(N) if i not in here.tolist()]
        assert not k[untouched].any() and not v[untouched].any(), name

host = torch.zeros(2, L, N, H, D, dtype=torch.uint8)
io.transfer_kv_all_layer(src_k_layers=table(K), dst_k_layers=table(list(host[0])), src_v_layers=table(V),
    dst_v_layers=table(list(host[1])), src_indices=here, dst_indices=there, item_size=item, num_layers=L)
check("layer_first", lambda w, l, s: host[w, l, s], lambda l, k, v: io.transfer_kv_per_layer(src_k=host[0][l], dst_k=k,
    src_v=host[1][l], dst_v=v, src_indices=there, dst_indices=here, item_size=item))

host2 = torch.zeros(2, N, L, H, D, dtype=torch.uint8)
io.transfer_kv_all_layer_lf_pf(src_k_layers=table(K), dst_k=host2[0], src_v_layers=table(V), dst_v=host2[1],
    src_indices=here, dst_indices=there, item_size=item, dst_layout_dim=item * L, num_layers=L)
check("page_first", lambda w, l, s: host2[w, s, l], lambda l, k, v: io.transfer_kv_per_layer_pf_lf(src_k=host2[0],
    dst_k=k, src_v=host2[1], dst_v=v, src_indices=there, dst_indices=here, layer_id=l, item_size=item,
    src_layout_dim=item * L))

host3 = torch.zeros(2, PAGES, H, P, L, D, dtype=torch.uint8)
io.transfer_kv_all_layer_lf_ph(src_k_layers=table(K), dst_k=host3[0], src_v_layers=table(V), dst_v=host3[1],
    src_indices=here, dst_indices=there, item_size=item, dst_layout_dim=item * L, num_layers=L, page_size=P, head_num=H)
check("page_head", lambda w, l, s: host3[w, s // P, :, s % P, l], lambda l, k, v: io.transfer_kv_per_layer_ph_lf(
    src_k=host3[0], dst_k=k, src_v=host3[1], dst_v=v, src_indices=there, dst_indices=here, layer_id=l, item_size=item,
    src_layout_dim=item * L, page_size=P, head_num=H))

host4 = torch.zeros(2, L, N, H, D, dtype=torch.uint8)
io.transfer_kv_direct(src_layers=K + V, dst_layers=[*host4[0], *host4[1]], src_indices=here, dst_indices=there,
    page_size=P)
check("direct", lambda w, l, s: host4[w, l, s], lambda l, k, v: io.transfer_kv_direct(
    src_layers=[host4[0][l], host4[1][l]], dst_layers=[k, v], src_indices=there, dst_indices=here, page_size=P))

host5 = torch.zeros(2, PAGES, L, P, H, D, dtype=torch.uint8)
io.transfer_kv_all_layer_direct_lf_pf(src_ptrs=K + V, dst_ptrs=[host5[0], host5[1]], src_indices=here,
    dst_indices=there, page_size=P)
check("page_first_direct", lambda w, l, s: host5[w, s // P, l, s % P], lambda l, k, v:
    io.transfer_kv_per_layer_direct_pf_lf(src_ptrs=[host5[0], host5[1]], dst_ptrs=[k, v], src_indices=there,
    dst_indices=here, layer_id=l, page_size=P))

empty = torch.empty(0, dtype=torch.int64)
io.transfer_kv_per_layer(host[0][0], K[0], host[1][0], V[0], empty, empty, item)
print("ok", len(io.TRANSFERS))
"""


PAGING = """
import random, torch
from hicache_stubs.paging import allocate_decode, allocate_extend
draw = random.Random(7)
for page in (1, 2, 16, 64):
    for _ in range(60):
        batch = draw.randint(1, 5)
        before = [draw.randint(0, 3 * page) for _ in range(batch)]
        after = [b + draw.randint(1, 4 * page) for b in before]
        free = torch.randperm(100) + 50
        opened = list(range(batch))  # request i's last token so far lies in page i, below all free pages
        last = torch.tensor([p * page + (b - 1) % page for p, b in zip(opened, before)])
        out = torch.full((sum(after) - sum(before),), -1)
        allocate_extend(torch.tensor(before), torch.tensor(after), last, free, out, 8, page)
        assert len(set(out.tolist())) == len(out) and (out >= 0).all()
        slots, used = iter(out.tolist()), iter(free.tolist())
        for p, b, a in zip(opened, before, after):
            here = p if b % page else None
            for position in range(b, a):
                if position % page == 0:
                    here = next(used)
                assert next(slots) == here * page + position % page, (page, b, a, position)
        one = torch.full((batch,), -1)
        allocate_decode(torch.tensor(before) + 1, last, free, one, 8, page)
        used = iter(free.tolist())
        for p, b, slot in zip(opened, before, one.tolist()):
            assert slot == (p if b % page else next(used)) * page + b % page
short = torch.full((40,), -1)
allocate_extend(torch.tensor([0]), torch.tensor([40]), torch.tensor([-1]), torch.tensor([5]), short, 1, 16)
assert (short == -1).all()
print("ok")
"""


@pytest.fixture(scope="module")
def python() -> str:
    return str(cpu_server.install(cpu_server.RELEASES[0]).python)


def run(python: str, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ |= {"STUBS": str(STUBS), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(STUBS)}
    return subprocess.run([python, "-c", HEAD + code], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("no_copy", ["0", "1"])
def test_every_layout_is_copied_byte_for_byte_or_not_at_all(python: str, no_copy: str) -> None:
    done = run(python, ROUND_TRIPS, HICACHE_LAB_NO_COPY=no_copy)
    assert done.stdout.strip() == "ok 13", done.stderr[-2000:]


def test_pages_are_given_out_as_the_kernels_do(python: str) -> None:
    done = run(python, PAGING)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sgl_kernel; sgl_kernel.rmsnorm(1)", "sgl_kernel.rmsnorm needs SGLang's GPU kernels"),
        ("from sgl_kernel import kvcacheio; kvcacheio.transfer_kv_mamba_lf_pf()", "needs SGLang's GPU kernels"),
        ("import torchvision; torchvision.ops.nms(1)", "torchvision.ops.nms was called"),
        ("import triton\n@triton.jit\ndef f(x): ...\nf[(1,)](3)", "triton kernel f was launched"),
    ],
)
def test_what_needs_a_gpu_raises_when_called(python: str, code: str, problem: str) -> None:
    done = run(python, code)
    assert done.returncode != 0
    assert problem in done.stderr


def test_making_pages_resident_stops_above_the_floor(python: str) -> None:
    code = """
import ctypes, torch
from hicache_stubs import patches
size = 512 * 2**20
buffer = (ctypes.c_char * size)()
cudart = torch.cuda.cudart()
code = cudart.cudaHostRegister(ctypes.addressof(buffer), size, 0)
print(code, cudart.cudaGetErrorString(code))
"""
    enough = run(python, code, HICACHE_LAB_RESIDENT="1", HICACHE_LAB_FLOOR_BYTES="0")
    assert enough.stdout.split()[0] == "0", enough.stderr
    short = run(python, code, HICACHE_LAB_RESIDENT="1", HICACHE_LAB_FLOOR_BYTES=str(2**60))
    assert "stopped making host pages resident at 0 of" in short.stdout
    assert short.stdout.splitlines()[-1] == "2 out of memory"
