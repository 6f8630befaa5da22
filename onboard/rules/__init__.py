"""Where each parameter stands in the checkpoint's files, found by values."""
