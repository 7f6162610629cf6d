"""Two steps on the ranks that torchrun started; rank 0 writes what came out."""

import json
import sys
from pathlib import Path

import colossalai
import torch.distributed as dist
from safetensors.torch import save_file

from consumer.accelerator import prepare
from consumer.training import Trainer
from tests.consumer.material import make_groups, make_settings

job = json.loads(sys.argv[1])
folder = Path(job["folder"])
prepare("cpu")
colossalai.launch_from_torch(seed=1, verbose=False)
trainer = Trainer(make_settings(Path(job["model"]), folder, trainer={"micro_batch_tokens": 64}))
result = [
    trainer.train(step, make_groups(job["groups"], size=job["size"], seed=step), planned_version=0, newest=0)
    for step in (1, 2)
]
if dist.get_rank() == 0:
    save_file({name: tensor.contiguous() for name, tensor in trainer.named_tensors()}, folder / "weights.safetensors")
    (folder / "result.json").write_text(json.dumps(result))
dist.destroy_process_group()
