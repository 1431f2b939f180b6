import csv
import random

pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
with open("qa.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["question", "answer"])
    for a, b in random.Random(0).sample(pairs, 1280):
        table.writerow([f"What is {a}+{b}?", a + b])
