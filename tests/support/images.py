"""What the serving image of the Dockerfile leaves out."""

OF_TRAINING = {"torch", "onnxscript", "safetensors"}
