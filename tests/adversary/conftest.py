"""Attacks: what somebody would try who wants to publish the break. Each must fail here, and say so when it does not."""
