"""nostall inside other programs: each module is imported by the program that it serves.

accelerate      the loader that Hugging Face Accelerate prepares
dlio            a data loader and a reader of checkpoints for the DLIO benchmark
hugging_face    the batches and the checkpoints of Hugging Face's Trainer
keras           the callback that gives Keras' fit the loader's epochs
lightning       the loader's numbers for Lightning's loggers
open_telemetry  metrics and spans for OpenTelemetry
torch_loader    an object of torch's class, for Keras and others
"""

__all__: list[str] = []
