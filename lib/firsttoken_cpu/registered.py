"""The extensions that this package adds to the library, by name: each is imported when it is asked for
(``study.extensions``)."""

ACCELERATOR = {"cpu": "firsttoken_cpu.cpu_accelerator:CPUAccelerator"}
BEFORE_TORCH = {
    "config": "firsttoken_cpu.lean.lean_config:lean_config",
    "model": "firsttoken_cpu.before_torch.numpy_model:NumpyModel",
    "plain": "firsttoken_cpu.before_torch.numpy_weights:FolderWeights",
    "staged": "firsttoken_cpu.before_torch.stage_weights:StageWeights",
    "answers": "firsttoken_cpu.before_torch.numpy_answers:NumpyAnswers",
    "take_over": "firsttoken_cpu.before_torch.torch_behind:take_over",
}
