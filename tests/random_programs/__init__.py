"""Training programs made at random; the same program is run beside, by hand or with torch's class.

`kinds` names them; read `program` first. `agreement` lets all ranks hear of an error, and `by_hand` averages.
"""
