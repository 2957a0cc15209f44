"""Inner loops in C++, compiled where they run. A fourth door of the hallway: every room may load one of its own.

To add one: put ``NAME.cpp`` beside this file (``extern "C"`` functions over plain pointers, no headers of torch,
``#pragma omp parallel for num_threads(threads)`` over independent records, ``threads`` given by the caller from
``torch.get_num_threads()``), and ask for it with ``load("NAME", check)``, where ``check(library)`` computes a small
case, compares, and says what is wrong, or None. Where ``load(…).library`` is None, go on as without it.
"""

from sordino.native.build import SWITCH, Native, load, set_aside

__all__ = ["SWITCH", "Native", "load", "set_aside"]
