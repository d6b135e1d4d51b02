"""Two PyTorch processes that share a tensor through CUDA IPC handles; prints both results as one line of JSON.

Usage: shared.py. The child adds to the tensor, and the parent reads the result and also adds to it. Both check the
sums.
"""

import json

import torch
import torch.multiprocessing as multiprocessing

WORDS = 16 << 20
ROUNDS = 20


def add(tensor, turns, answers):
    for number in range(ROUNDS):
        turns.get()
        tensor.add_(1)
        torch.cuda.synchronize()
        answers.put(int(tensor.sum().item()))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    # Allocate another tensor first, so that the shared one is not at the start of the allocator's segment.
    before = torch.ones(1 << 20, dtype=torch.int64, device="cuda")
    tensor = torch.zeros(WORDS, dtype=torch.int64, device="cuda")
    turns, answers = multiprocessing.Queue(), multiprocessing.Queue()
    child = multiprocessing.Process(target=add, args=(tensor, turns, answers))
    child.start()
    right = True
    for number in range(ROUNDS):
        turns.put(number)
        right &= answers.get(timeout=60) == WORDS * (2 * number + 1)
        tensor.add_(1)
        torch.cuda.synchronize()
        right &= int(tensor.sum().item()) == WORDS * (2 * number + 2)
    child.join(60)
    right &= bool((before == 1).all())
    print(json.dumps({"right": right, "code": child.exitcode}))
