"""Record the signatures of the installed torch_npu's operators: how a version is added to those we know.

python tools/npu_schemas.py      # in an environment where `import torch_npu` works
"""

from __future__ import annotations

from lctrain.ops.npu_schemas import RECORDED, record

if __name__ == "__main__":
    print(f"torch_npu {record()} recorded in {RECORDED}")
