"""Prints text from a checkpoint of examples/gpt.py, in one process, with Lightning alone.

python examples/sample.py runs/gpt/gpt.ckpt --prompt "The "
"""

import argparse

import torch
from examples.gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--num-bytes", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.6)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT.load_from_checkpoint(options.checkpoint, map_location="cpu", weights_only=True)
    model.eval()
    print(model.generate(options.prompt, options.num_bytes, options.temperature))


if __name__ == "__main__":
    main()
