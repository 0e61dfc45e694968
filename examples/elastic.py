"""An elastic job of torchrun: when a node is lost, the others go on with the same global batches.

    python examples/make-data.py /data
    torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d \
        --rdzv-id=job1 --rdzv-endpoint=head:29400 examples/elastic.py /data /shared/checkpoints

The second command runs on each node. /data has images/; all nodes see the checkpoints.
"""

import sys
from pathlib import Path

import torch
from torch import distributed

import nostall
from nostall import transforms as t

EPOCHS, GLOBAL_BATCH = 4, 5


def main(root, checkpoints):
    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    paths = sorted(Path(root, "images").glob("*.jpg"))
    data = nostall.FileList(paths, range(len(paths)))
    loader = nostall.DataLoader(
        data,
        global_batch_size=GLOBAL_BATCH,
        epochs=EPOCHS,
        transforms=[t.Resize((32, 32)), t.ToTensor()],
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 14))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # How often the weights have seen each sample.
    seen = torch.zeros(len(data), dtype=torch.int64)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "seen": seen, "step": 0}
    with nostall.Checkpointer(durable=checkpoints, replicated=True) as ckpt:
        ckpt.restore(into=state)
        print(f"{ranks} ranks go on at step {state['step']}", flush=True)
        for epoch in loader.epochs():
            for images, labels in epoch:
                # DDP takes the mean over ranks, whose parts differ by one sample at most: scaled
                # so, each sample weighs the same, also in a last batch that has fewer of them.
                loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="sum")
                (loss * ranks / GLOBAL_BATCH).backward()
                optimizer.step()
                optimizer.zero_grad()
                taken = torch.bincount(labels, minlength=len(data))
                distributed.all_reduce(taken)
                seen += taken
                state["step"] += 1
                ckpt.save(state, state["step"])
    loader.close()
    assert seen.tolist() == [EPOCHS] * len(data), seen
    print(f"{ranks} ranks: each sample was trained once an epoch", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
