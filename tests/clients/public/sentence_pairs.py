"""sentence-transformers' trainer on a small BERT, with the negatives of both ranks."""

import os

from datasets import Dataset
from ending import end
from language import SETTINGS, losses_of, make_tokenizer, sentence
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, set_seed


def main():
    set_seed(0)
    folder = f"bert{os.environ['RANK']}"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokenizer = make_tokenizer()
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = Transformer(folder)
    model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())], device="cpu")
    rows = Dataset.from_list([{"anchor": sentence(12), "positive": sentence(16)} for _ in range(128)])
    trainer = SentenceTransformerTrainer(
        model,
        args=SentenceTransformerTrainingArguments(**SETTINGS, per_device_train_batch_size=8),
        train_dataset=rows,
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=True),
    )
    trainer.train()
    end(losses_of(trainer), model)


if __name__ == "__main__":
    main()
