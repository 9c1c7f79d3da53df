"""Where blocks lie. A tier knows no policy: it gives out slots and moves bytes."""
