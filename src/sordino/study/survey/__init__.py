"""A survey: what sites' columns hold, asked before there is a schema, and the study that is drafted from the answers.

``plan``: what it costs and how precise it will be; ``figures``: estimates from the released tables; ``draft``: a study
file made of them; ``rehearse``: all of it on files at hand; ``conduct``: with real sites; ``show``: tables to read.
"""
