import sys, subprocess, json
import torch
sys.path[:0] = ["tests/kernels"]
def case(kind, precision, unit, dim, group, pieces):
    from paged import paged, close, poisoned
    from kvtier.layout import AttentionLayout
    from kvtier_kernels import reference, tuning
    from kvtier_kernels.decode import decode
    from kvtier_kernels.prefill import prefill
    if pieces:
        tuning.Stored.pieces = lambda self, words: 1 if self.kind == 0 else pieces
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=dim, dtype=precision, unit_tokens=unit)
    torch.manual_seed(0)
    if kind == "decode":
        cache = paged(layout, [1000, 0, 1, 517])
        q = torch.randn(4, 1, 2 * group, dim, device="cuda").bfloat16()
        out, lse = decode(q, cache.table, cache.lengths, layout, 1)
        want, wl = reference.decode(q, cache.table, cache.lengths, cache.layouts, 1, scale=dim**-0.5)
    else:
        cache = paged(layout, [1000, 300, 1])
        q = torch.randn(501, 2 * group, dim, device="cuda").bfloat16()
        cu = torch.tensor([0, 200, 500, 501], dtype=torch.int32, device="cuda")
        out, lse = prefill(q, cu, cache.table, cache.lengths, layout, 1, most_queries=300)
        want, wl = reference.prefill(q, cu, cache.table, cache.lengths, cache.layouts, 1, scale=dim**-0.5)
    torch.cuda.synchronize()
    e = (out.double() - want).norm() / want.norm()
    le = torch.where(wl.isinf(), 0.0, (lse.double() - wl)).norm() / torch.where(wl.isinf(), 0.0, wl).norm()
    return f"out {e:.2e} lse {le:.2e} nan {int(out.isnan().sum())}"
CASES = [("decode","bfloat16",64,128,64,0),("decode","int8",64,128,64,0),("decode","int8",64,128,64,4),("decode","float8_e4m3fn",64,128,64,0),("decode","int4",64,128,64,0),("decode","int4",64,128,64,4),("decode","int8",64,128,8,0),
 ("prefill","bfloat16",64,128,4,0),("prefill","int8",64,128,4,0),("prefill","int8",64,128,4,4),("prefill","float8_e4m3fn",64,128,4,0),("prefill","int4",64,128,4,0),("prefill","int4",64,128,4,4),("prefill","int8",16,128,4,0),("prefill","int4",16,128,4,0),("prefill","bfloat16",64,256,4,0),("prefill","bfloat16",16,64,4,0),("prefill","float8_e4m3fn",64,64,4,0),("prefill","int4",64,256,4,0)]
if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(case(*json.loads(sys.argv[1])))
    else:
        ps = [(c, subprocess.Popen([sys.executable, __file__, json.dumps(c)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) for c in CASES]
        for c, p in ps:
            o, e = p.communicate()
            print(c, o.strip() or "FAILED " + " | ".join([x for x in e.strip().splitlines() if "rror" in x][-3:])[:300])
