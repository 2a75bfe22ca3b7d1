"""Small click logs as frames: a user, an item and a price decide together."""

import numpy as np
import pandas as pd


def click_frame(rows: int = 600, seed: int = 0) -> pd.DataFrame:
    """A frame with text, integers and numbers, some of them missing."""
    random = np.random.default_rng(seed)
    user, item, price = random.integers(0, 20, rows), random.integers(0, 10, rows), random.normal(size=rows)
    logit = np.random.default_rng(1).normal(size=20)[user] + np.random.default_rng(2).normal(size=10)[item] + price
    clicked = random.random(rows) < 1 / (1 + np.exp(-logit))
    price[::50] = np.nan
    names = pd.Series([f"u{number}" for number in user])
    names[7] = None
    return pd.DataFrame({"user": names, "item": item, "price": price, "clicked": clicked.astype(int)})
