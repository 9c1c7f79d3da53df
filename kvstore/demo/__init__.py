"""The main job on a real model, end to end: one sidecar, two engines, one prefill."""
