"""Detection with lists of images and of targets; segmentation with statistics per class and supervision at depth."""

import torch
import torchmetrics
from conformance.case import Case, Rows, loaders, waves
from lightning.pytorch import LightningModule
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

SIDE, CLASSES = 8, 3


def scene(index):
    """An image and its boxes as (x, y, x, y) in parts of its side; scenes have one to three."""
    count = 1 + index % 3
    corners = 0.25 + 0.2 * waves(2, count=count * (index + 1))[-count:]
    sizes = 0.2 + 0.1 * waves(2, count=count * (index + 1), phase=1.0)[-count:]
    boxes = torch.cat([corners, corners + sizes], 1)
    return waves(3, SIDE, SIDE, count=index + 1)[index], {
        "boxes": boxes,
        "labels": (torch.arange(count) + index) % CLASSES,
    }


def collate_lists(samples):
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def scenes():
    return loaders(Rows(scene), Rows(scene, 16), collate_fn=collate_lists)


def box_iou(a, b):
    inter = (torch.min(a[:, None, 2:], b[None, :, 2:]) - torch.max(a[:, None, :2], b[None, :, :2])).clamp(min=0)
    inter, area = inter.prod(-1), (a[:, 2:] - a[:, :2]).prod(-1)[:, None]
    union = area + (b[:, 2:] - b[:, :2]).prod(-1) - inter
    return inter / union


def to_corners(boxes):
    center, size = boxes.chunk(2, -1)
    return torch.cat([center - size / 2, center + size / 2], -1)


class DETR(LightningModule):
    """Queries are matched with targets by scipy, on costs that are values of the model."""

    def __init__(self, width=8, queries=4, lr=1e-3, lr_backbone=1e-4, weight_decay=1e-4, eos_coef=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1))
        self.positions = nn.Parameter(torch.rand(4, width))
        self.query_embed = nn.Embedding(queries, width)
        self.transformer = nn.Transformer(width, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.class_embed = nn.Linear(width, CLASSES + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
        weight = torch.ones(CLASSES + 1)
        weight[-1] = eos_coef
        self.register_buffer("empty_weight", weight)

    def forward(self, images):
        features = self.backbone(torch.stack(images)).flatten(2).transpose(1, 2)
        queries = self.query_embed.weight.expand(len(images), -1, -1)
        hidden = self.transformer(features + self.positions, queries)
        return self.class_embed(hidden), self.bbox_embed(hidden).sigmoid()

    @torch.no_grad()
    def match(self, logits, boxes, targets):
        probabilities, pairs = logits.softmax(-1), []
        for row, box, target in zip(probabilities, boxes, targets, strict=True):
            cost = torch.cdist(box, target["boxes"], p=1) - row[:, target["labels"]]
            cost = cost - box_iou(to_corners(box), target["boxes"])
            source, chosen = linear_sum_assignment(cost.cpu().numpy())
            pairs.append((torch.as_tensor(source), torch.as_tensor(chosen)))
        return pairs

    def common_step(self, batch):
        images, targets = batch
        logits, boxes = self(images)
        pairs = self.match(logits, boxes, targets)
        labels = torch.full(logits.shape[:2], CLASSES, device=self.device)
        box_loss, num_boxes = 0.0, sum(len(target["labels"]) for target in targets)
        for index, ((source, chosen), target) in enumerate(zip(pairs, targets, strict=True)):
            labels[index, source] = target["labels"][chosen]
            predicted = to_corners(boxes[index, source])
            box_loss = box_loss + F.l1_loss(predicted, target["boxes"][chosen], reduction="sum")
            box_loss = box_loss + (1 - box_iou(predicted, target["boxes"][chosen]).diagonal()).sum()
        losses = {"loss_ce": F.cross_entropy(logits.transpose(1, 2), labels, self.empty_weight)}
        losses["loss_bbox"] = box_loss / max(num_boxes, 1)
        return losses["loss_ce"] + 5 * losses["loss_bbox"], losses

    def training_step(self, batch, batch_idx):
        loss, losses = self.common_step(batch)
        self.log("training_loss", loss, batch_size=len(batch[0]))
        for name, value in losses.items():
            self.log("train_" + name, value.item(), batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.common_step(batch)[0], batch_size=len(batch[0]))

    def configure_optimizers(self):
        named = list(self.named_parameters())
        groups = [
            {"params": [p for n, p in named if "backbone" not in n and p.requires_grad]},
            {"params": [p for n, p in named if "backbone" in n], "lr": self.hparams.lr_backbone},
        ]
        return torch.optim.AdamW(groups, lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)


class RetinaNet(LightningModule):
    """Anchors take the target that covers them best; the focal loss is summed in a loop over images."""

    def __init__(self, width=8, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1), nn.ReLU()
        )
        self.lateral, self.smooth = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding=1)
        self.cls_head = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, CLASSES, 1))
        self.reg_head = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, 4, 1))
        steps = (torch.arange(SIDE // 2) + 0.5) / (SIDE // 2)
        centers = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).flatten(0, 1)
        self.register_buffer("anchors", torch.cat([centers - 0.15, centers + 0.15], 1), persistent=False)

    def forward(self, images, targets=None):
        features = self.backbone(torch.stack(list(images)))
        features = self.smooth(self.lateral(features) + features)
        scores = self.cls_head(features).flatten(2).transpose(1, 2)
        deltas = self.reg_head(features).flatten(2).transpose(1, 2)
        if targets is not None:
            return self.losses(scores, deltas, targets)
        found = []
        for score, delta in zip(scores.sigmoid(), deltas, strict=True):
            best, label = score.max(-1)
            keep = best > 0.3
            found.append({"boxes": (self.anchors + 0.1 * delta)[keep], "scores": best[keep], "labels": label[keep]})
        return found

    def losses(self, scores, deltas, targets):
        classification, regression = [], []
        for score, delta, target in zip(scores, deltas, targets, strict=True):
            quality, matched = box_iou(self.anchors, target["boxes"]).max(1)
            foreground = quality > 0.2
            num_foreground = max(1, int(foreground.sum()))
            wanted = torch.zeros_like(score)
            wanted[foreground, target["labels"][matched[foreground]]] = 1.0
            p = score.sigmoid()
            focal = (p * (1 - wanted) + (1 - p) * wanted) ** 2
            loss = focal * F.binary_cross_entropy_with_logits(score, wanted, reduction="none")
            classification.append(loss.sum() / num_foreground)
            offsets = (target["boxes"][matched[foreground]] - self.anchors[foreground]) / 0.1
            regression.append(F.smooth_l1_loss(delta[foreground], offsets, reduction="sum") / num_foreground)
        count = len(targets)
        return {"classification": sum(classification) / count, "bbox_regression": sum(regression) / count}

    def training_step(self, batch, batch_idx):
        images, targets = batch
        losses = self(images, targets)
        self.log_dict({f"train/{name}": value for name, value in losses.items()}, batch_size=len(images))
        return sum(losses.values())

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        found = self(images)
        hits = 0
        for prediction, target in zip(found, targets, strict=True):
            if len(prediction["boxes"]) > 0:
                hits += int((box_iou(prediction["boxes"], target["boxes"]).max(0).values > 0.3).sum())
        self.log("recall", hits / sum(len(target["labels"]) for target in targets), batch_size=len(images))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)]


def conv_block(channels_in, channels):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNetBackbone(nn.Module):
    """Returns what each level of the decoder made, the finest last."""

    def __init__(self, channels, norm=conv_block):
        super().__init__()
        self.down = nn.ModuleList(norm(a, b) for a, b in zip((3, *channels), channels, strict=False))
        pairs = list(zip(channels[1:], channels, strict=False))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.merge = nn.ModuleList(norm(2 * b, b) for _, b in pairs)

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        outputs = []
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
            outputs.append(x)
        return outputs


class BinaryUNet(LightningModule):
    """Each step appends its counts to a list on the module; intersections over unions come at the end of the epoch."""

    def __init__(self, channels=(4, 8, 16)):
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("std", torch.tensor([0.5, 0.6, 0.7]).view(1, 3, 1, 1))
        self.model, self.head = UNetBackbone(channels), nn.Conv2d(channels[0], 1, 1)
        self.training_step_outputs, self.validation_step_outputs = [], []

    def forward(self, image):
        return self.head(self.model(image / self.std)[-1])

    def shared_step(self, batch):
        image, mask = batch["image"], batch["mask"]
        assert image.shape[2] % 4 == 0 and mask.ndim == 4 and mask.max() <= 1.0 and mask.min() >= 0
        logits = self(image)
        probability = logits.sigmoid()
        overlap = (probability * mask).sum((1, 2, 3))
        dice = 1 - (2 * overlap + 1) / (probability.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        loss = dice.mean() + F.binary_cross_entropy_with_logits(logits, mask)
        predicted, wanted = probability > 0.5, mask > 0.5
        counts = {
            "tp": (predicted & wanted).sum((1, 2, 3)),
            "fp": (predicted & ~wanted).sum((1, 2, 3)),
            "fn": (~predicted & wanted).sum((1, 2, 3)),
        }
        return {"loss": loss, **counts}

    def shared_epoch_end(self, outputs, stage):
        tp, fp, fn = (torch.cat([output[name] for output in outputs]) for name in ("tp", "fp", "fn"))
        per_image = (tp / (tp + fp + fn).clamp(min=1)).mean()
        self.log_dict({f"{stage}_per_image_iou": per_image, f"{stage}_iou": tp.sum() / (tp + fp + fn).sum()})
        outputs.clear()

    def training_step(self, batch, batch_idx):
        output = self.shared_step(batch)
        self.training_step_outputs.append({name: value.detach() for name, value in output.items()})
        return output

    def on_train_epoch_end(self):
        self.shared_epoch_end(self.training_step_outputs, "train")

    def validation_step(self, batch, batch_idx):
        output = self.shared_step(batch)
        self.validation_step_outputs.append(output)
        return output

    def on_validation_epoch_end(self):
        self.shared_epoch_end(self.validation_step_outputs, "valid")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


class SoftDice(nn.Module):
    def forward(self, logits, target, per_class=False):
        probability = logits.softmax(1)
        one_hot = F.one_hot(target, logits.shape[1]).movedim(-1, 1).to(probability)
        overlap, sizes = (probability * one_hot).sum((2, 3)), (probability + one_hot).sum((2, 3))
        dice = (2 * overlap + 1e-5) / (sizes + 1e-5)
        return dice.mean(0) if per_class else 1 - dice[:, 1:].mean()


def instance_block(channels_in, channels):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1), nn.InstanceNorm2d(channels, affine=True), nn.LeakyReLU(0.01)
    )


class DeepSupervision(LightningModule):
    """Each level of the decoder has its own head and a target of its size, weighted by halves, as nnU-Net does."""

    def __init__(self, channels=(4, 8, 16), lr=1e-2, max_steps=6):
        super().__init__()
        self.save_hyperparameters()
        self.model = UNetBackbone(channels, instance_block)
        self.heads = nn.ModuleList(nn.Conv2d(c, CLASSES, 1, bias=False) for c in channels[:-1][::-1])
        self.dice, self.ce = SoftDice(), nn.CrossEntropyLoss()
        weights = torch.tensor([0.5 ** (len(self.heads) - 1 - level) for level in range(len(self.heads))])
        self.weights = (weights / weights.sum()).tolist()

    def forward(self, image):
        outputs = [head(level) for head, level in zip(self.heads, self.model(image), strict=True)]
        return outputs if self.training else outputs[-1]

    def training_step(self, batch, batch_idx):
        image, mask = batch["image"], batch["labels"]
        loss = 0.0
        for weight, logits in zip(self.weights, self(image), strict=True):
            size = logits.shape[-2:]
            target = F.interpolate(mask[:, None].float(), size=size, mode="nearest")[:, 0].long()
            loss = loss + weight * (self.dice(logits, target) + self.ce(logits, target))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch["image"])
        for index, value in enumerate(self.dice(logits, batch["labels"], per_class=True)):
            self.log(f"val_dice/class_{index}", value)
        return logits

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.99, nesterov=True, weight_decay=3e-5)
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, self.hparams.max_steps, power=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class DeepLab(LightningModule):
    """An auxiliary head, labels of 255 that count for nothing, a metric of torchmetrics, and two learning rates."""

    def __init__(self, width=8, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.ModuleDict({"layer3": conv_block(3, width), "layer4": conv_block(width, width)})
        self.branches = nn.ModuleList(nn.Conv2d(width, width, 3, padding=rate, dilation=rate) for rate in (1, 2, 3))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(4 * width, width, 1), nn.ReLU(), nn.Conv2d(width, CLASSES, 1))
        self.aux_classifier = nn.Sequential(conv_block(width, width), nn.Conv2d(width, CLASSES, 1))
        metric = torchmetrics.classification.MulticlassJaccardIndex
        self.train_iou, self.val_iou = (metric(CLASSES, ignore_index=255) for _ in range(2))

    def forward(self, image):
        size = image.shape[-2:]
        auxiliary = self.backbone["layer3"](image)
        features = self.backbone["layer4"](auxiliary)
        pooled = F.interpolate(self.pool(features), size=size, mode="bilinear", align_corners=False)
        out = self.project(torch.cat([*(branch(features) for branch in self.branches), pooled], 1))
        return {"out": out, "aux": self.aux_classifier(auxiliary)}

    def training_step(self, batch, batch_idx):
        output, target = self(batch["image"]), batch["labels_with_void"]
        losses = {name: F.cross_entropy(logits, target, ignore_index=255) for name, logits in output.items()}
        self.train_iou(output["out"].argmax(1), target)
        self.log("train_iou", self.train_iou, on_step=False, on_epoch=True)
        self.log_dict(losses)
        return losses["out"] + 0.5 * losses["aux"]

    def validation_step(self, batch, batch_idx):
        self.val_iou(self(batch["image"])["out"].argmax(1), batch["labels_with_void"])
        self.log("val_iou", self.val_iou)

    def configure_optimizers(self):
        body = {"params": self.backbone.parameters(), "lr": self.hparams.lr * 0.1}
        heads = [*self.branches.parameters(), *self.pool.parameters(), *self.project.parameters()]
        groups = [body, {"params": heads}, {"params": self.aux_classifier.parameters(), "lr": self.hparams.lr * 2}]
        return torch.optim.SGD(groups, lr=self.hparams.lr, momentum=0.9)


def picture(index):
    image = waves(3, SIDE, SIDE, count=index + 1)[index]
    labels = ((image.sum(0) + 1.5) * CLASSES / 3).long().clamp(0, CLASSES - 1)
    void = labels.clone()
    void[: index % 3, :] = 255
    return {
        "image": image,
        "mask": (image.sum(0, keepdim=True) > 0).float(),
        "labels": labels,
        "labels_with_void": void,
    }


def pictures():
    return loaders(Rows(picture), Rows(picture, 16))


CASES = [
    Case(DETR, scenes, trainer={"gradient_clip_val": 0.1}, layouts=("sp2",)),
    Case(RetinaNet, scenes, layouts=("sp2",)),
    Case(
        BinaryUNet,
        pictures,
        layouts=("sp2",),
        of_each_replica=("train_per_image_iou", "train_iou", "valid_per_image_iou", "valid_iou"),
    ),
    Case(DeepSupervision, pictures, trainer={"gradient_clip_val": 12.0}, layouts=("sp2",)),
    Case(DeepLab, pictures, layouts=("sp2",)),
]
