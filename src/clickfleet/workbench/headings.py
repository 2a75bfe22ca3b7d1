"""Headings of comparison tables and charts, in English and Chinese.

>>> heading("test AUC", "zh"), heading("test AUC", "en"), heading("my_metric", "zh")
('测试集 AUC', 'test AUC', 'my_metric')
"""

from __future__ import annotations

from typing import Literal, get_args

from clickfleet.config.plugins import closest
from clickfleet.errors import ConfigError

Language = Literal["en", "zh"]

CHINESE = {
    "model": "模型",
    "training loss": "训练损失",
    "training AUC": "训练集 AUC",
    "validation AUC": "验证集 AUC",
    "validation log loss": "验证集对数损失",
    "test AUC": "测试集 AUC",
    "test log loss": "测试集对数损失",
    "rows/s": "行/秒",
    "parameters": "参数量",
    "seconds": "用时（秒）",
    "without result": "无结果",
    "failed": "失败",
    "not finished": "未完成",
    "as configured": "当前配置",
    "Models": "模型",
    "Curves": "曲线",
    "Failed": "失败的训练",
    "Environment": "运行环境",
    "this machine": "本机",
    "comparison": "对比",
    "Validation AUC": "验证集 AUC",
    "Training AUC": "训练集 AUC",
    "Test AUC": "测试集 AUC",
    "Validation log loss": "验证集对数损失",
    "Training loss": "训练损失",
    "rows trained on": "已训练行数",
    "Epochs": "训练轮数",
    "Batch size": "批次大小",
    "Learning rate": "学习率",
    "Layers": "网络层",
    "Optimizer of rows and network": "稀疏参数与网络的优化器",
}


def known_language(name: str) -> Language:
    """Return a language by name. Raise for one that has no headings."""
    for language in get_args(Language):
        if language == name:
            return language  # type: ignore[no-any-return]
    raise ConfigError(f"unknown language {name!r}{closest(name, get_args(Language))}")


def heading(text: str, language: Language) -> str:
    """Return a heading in a language. A text without translation, such as the name of a setting, stays."""
    return CHINESE.get(text, text) if language == "zh" else text
