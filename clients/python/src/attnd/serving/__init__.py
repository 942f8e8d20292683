"""What serving engines that are attnd's workers have in common: attnd-vllm, attnd-sglang and attnd.hf use
it.

    requests.py  a worker's requests and their sequences; knows no engine
    model.py     what K and V of a model mean, so that only equal models share them; needs torch
    copies.py    steps of tensors on a GPU, through host memory; needs torch
"""
