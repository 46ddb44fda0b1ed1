from dataclasses import dataclass


@dataclass
class About:
    model: str
def write_report(folder, about=None): ...
