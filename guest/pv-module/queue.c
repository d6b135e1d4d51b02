// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* The virtqueue: submits batches of operations, and waits for their end. */

#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/ktime.h>

#include "priv.h"

#define LIMIT_NS	(2 * NSEC_PER_SEC)
#define REQUEST_BYTES	GMPV_MAX_BATCH_BYTES
#define ANSWER_BYTES	(sizeof(struct gmpv_answer_header) + GMPV_MAX_BATCH_OPS * sizeof(struct gmpv_answer))
#define RING_ALIGN	16

#define le16(x) ((__force __virtio16)cpu_to_le16(x))
#define le32(x) ((__force __virtio32)cpu_to_le32(x))
#define le64(x) ((__force __virtio64)cpu_to_le64(x))

static const char *op_name(u16 code)
{
	switch (code) {
	case GMPV_OP_TABLE_CREATE: return "table create";
	case GMPV_OP_TABLE_DESTROY: return "table destroy";
	case GMPV_OP_DIRECTORY_SET: return "directory set";
	case GMPV_OP_ENTRIES_RUN: return "entries run";
	case GMPV_OP_ENTRIES_LIST: return "entries list";
	case GMPV_OP_ENTRIES_ZERO: return "entries zero";
	case GMPV_OP_DIRECTORY_BIND: return "directory bind";
	case GMPV_OP_FLUSH: return "flush";
	case GMPV_OP_CHANNEL_CREATE: return "channel create";
	case GMPV_OP_CHANNEL_BIND: return "channel bind";
	case GMPV_OP_CHANNEL_ENABLE: return "channel enable";
	case GMPV_OP_CHANNEL_DISABLE: return "channel disable";
	case GMPV_OP_CHANNEL_DESTROY: return "channel destroy";
	case GMPV_OP_RUNLIST: return "runlist";
	case GMPV_OP_MEMORY_FILL: return "memory fill";
	case GMPV_OP_MEMORY_COPY: return "memory copy";
	case GMPV_OP_BUFFER_PRIORITY: return "buffer priority";
	case GMPV_OP_SHARE_GET: return "share get";
	case GMPV_OP_SHARE_ATTACH: return "share attach";
	case GMPV_OP_SHARE_DETACH: return "share detach";
	case GMPV_OP_SHARE_CONTROL: return "share control";
	case GMPV_OP_QUERY: return "query";
	default: return "operation";
	}
}

static const struct {
	const char *text;
	int error;
} results[] = {
	[GMPV_RESULT_DONE] = { "done", 0 },
	[GMPV_RESULT_NOT_BEGUN] = { "not begun", -EIO },
	[GMPV_RESULT_MALFORMED] = { "malformed", -EIO },
	[GMPV_RESULT_UNSUPPORTED] = { "unsupported", -EOPNOTSUPP },
	[GMPV_RESULT_NO_OBJECT] = { "no such object", -ENOENT },
	[GMPV_RESULT_EXISTS] = { "exists already", -EEXIST },
	[GMPV_RESULT_WRONG_TYPE] = { "wrong type", -EINVAL },
	[GMPV_RESULT_RANGE] = { "out of range", -ERANGE },
	[GMPV_RESULT_INVALID] = { "invalid value", -EINVAL },
	[GMPV_RESULT_LIMIT] = { "a limit is reached", -ENOSPC },
	[GMPV_RESULT_DENIED] = { "not allowed", -EACCES },
	[GMPV_RESULT_FAILED] = { "failed in the mediator", -EIO },
};

static const char *result_name(u32 status)
{
	return status < ARRAY_SIZE(results) ? results[status].text : "an unknown status";
}

static int result_error(u32 status)
{
	return status < ARRAY_SIZE(results) ? results[status].error : -EIO;
}

static void kill_queue(struct gmpv *pv, const char *why)
{
	if (!xchg(&pv->dead, true))
		dev_err(pv->dev, "gpu-mediator: %s; nothing more is asked of it (status %#x)\n", why,
			readl(pv->regs + GMPV_REGISTER_STATUS));
}

/* Collects ended batches. The caller must hold the lock. */
static void collect(struct gmpv *pv)
{
	u16 used = le16_to_cpu((__force __le16)READ_ONCE(pv->vring.used->idx));
	/* The entries before the index were written before the index. */
	dma_rmb();
	while (pv->last_used != used) {
		u32 id = le32_to_cpu((__force __le32)pv->vring.used->ring[pv->last_used % GMPV_QUEUE].id);

		if (id < GMPV_QUEUE && pv->batches[id / 2].taken)
			pv->batches[id / 2].ended = true;
		pv->last_used++;
	}
}

static struct gmpv_batch *take(struct gmpv *pv)
{
	unsigned int i;

	for (i = 0; i < GMPV_SLOTS; i++) {
		struct gmpv_batch *batch = &pv->batches[i];

		if (batch->taken)
			continue;
		batch->taken = true;
		batch->ended = false;
		batch->quiet = false;
		batch->ops = 0;
		batch->bytes = 0;
		batch->tail = NULL;
		return batch;
	}
	return NULL;
}

/* Submits a batch. The caller must hold the lock. */
static void publish(struct gmpv_batch *batch)
{
	struct gmpv *pv = batch->pv;
	unsigned int head = 2 * batch->index;
	struct vring_desc *desc = &pv->vring.desc[head];
	u16 next = pv->next_avail++;

	batch->ended = false;
	batch->tail = NULL;
	batch->request->ops = cpu_to_le32(batch->ops);
	batch->request->bytes = cpu_to_le32(batch->bytes);
	batch->answer->status = cpu_to_le32(~0);
	batch->answer->done = 0;
	desc[0].addr = le64(batch->request_dma);
	desc[0].len = le32(sizeof(*batch->request) + batch->bytes);
	desc[0].flags = le16(VRING_DESC_F_NEXT);
	desc[0].next = le16(head + 1);
	desc[1].addr = le64(batch->answer_dma);
	desc[1].len = le32(sizeof(*batch->answer) + batch->ops * sizeof(struct gmpv_answer));
	desc[1].flags = le16(VRING_DESC_F_WRITE);
	desc[1].next = 0;
	pv->vring.avail->ring[next % GMPV_QUEUE] = le16(head);
	/* The device reads the entries before the index, so they must be written before the index. */
	dma_wmb();
	WRITE_ONCE(pv->vring.avail->idx, le16(next + 1));
	writel(0, pv->regs + GMPV_REGISTER_DOORBELL);
	atomic64_inc(&pv->counters.doorbells);
	atomic64_inc(&pv->counters.calls);
	atomic64_add(batch->ops, &pv->counters.operations);
}

static bool ended(struct gmpv_batch *batch)
{
	struct gmpv *pv = batch->pv;
	unsigned long flags;
	bool ended;

	spin_lock_irqsave(&pv->lock, flags);
	collect(pv);
	ended = batch->ended;
	spin_unlock_irqrestore(&pv->lock, flags);
	return ended;
}

static int wait(struct gmpv_batch *batch)
{
	struct gmpv *pv = batch->pv;
	u64 begin = ktime_get_mono_fast_ns();

	do {
		if (ended(batch))
			return 0;
		cpu_relax();
	} while (ktime_get_mono_fast_ns() - begin < gmpv_spin_us * NSEC_PER_USEC);
	do {
		/* The read returns when all batches that were submitted earlier have ended. */
		readl(pv->regs + GMPV_REGISTER_ENDED);
		atomic64_inc(&pv->counters.polls);
		if (ended(batch))
			return 0;
		cpu_relax();
	} while (ktime_get_mono_fast_ns() - begin < LIMIT_NS &&
		 readl(pv->regs + GMPV_REGISTER_STATUS) == GMPV_STATUS_READY);
	kill_queue(pv, "a batch has not ended");
	return -EIO;
}

static void release(struct gmpv_batch *batch)
{
	unsigned long flags;

	spin_lock_irqsave(&batch->pv->lock, flags);
	batch->taken = false;
	spin_unlock_irqrestore(&batch->pv->lock, flags);
}

static struct gmpv_op_header *nth(struct gmpv_batch *batch, u32 n)
{
	void *op = batch->request + 1;

	while (n--)
		op += GMPV_UNIT * le16_to_cpu(((struct gmpv_op_header *)op)->units);
	return op;
}

/*
 * Waits for a submitted batch, and frees it. If @rest is true, the operations after a failed one are submitted again,
 * because they may unmap memory that is about to be freed. Otherwise, they are not executed.
 *
 * The result and @value are those of the last operation.
 */
static int finish(struct gmpv_batch *batch, bool rest, u64 *value)
{
	struct gmpv *pv = batch->pv;
	struct gmpv_answer *answers = (struct gmpv_answer *)(batch->answer + 1);
	struct gmpv_op_header *op;
	unsigned long flags;
	u32 status, done;
	int ret;

	for (;;) {
		ret = wait(batch);
		if (ret)
			/* The slot is lost, because the device may still write to its memory. */
			return ret;
		status = le32_to_cpu(batch->answer->status);
		done = le32_to_cpu(batch->answer->done);
		if (status == GMPV_RESULT_DONE && done == batch->ops) {
			if (value)
				*value = le64_to_cpu(answers[batch->ops - 1].value);
			break;
		}
		ret = result_error(status) ?: -EIO;
		atomic64_inc(&pv->counters.failures);
		if (done >= batch->ops || status == GMPV_RESULT_MALFORMED) {
			dev_err_ratelimited(pv->dev, "gpu-mediator: a batch of %u: %s, %u done\n", batch->ops,
					    result_name(status), done);
			break;
		}
		op = nth(batch, done);
		if (!batch->quiet)
			dev_err_ratelimited(pv->dev, "gpu-mediator: %s of %#x, %u of %u: %s\n",
					    op_name(le16_to_cpu(op->code)), le32_to_cpu(op->handle), done + 1,
					    batch->ops, result_name(status));
		if (done + 1 == batch->ops || !rest)
			break;
		op = nth(batch, done + 1);
		batch->bytes -= (void *)op - (void *)(batch->request + 1);
		batch->ops -= done + 1;
		memmove(batch->request + 1, op, batch->bytes);
		spin_lock_irqsave(&pv->lock, flags);
		publish(batch);
		spin_unlock_irqrestore(&pv->lock, flags);
		ret = 0;
	}
	release(batch);
	return ret;
}

struct gmpv_batch *gmpv_begin(struct gmpv *pv)
{
	u64 begin = ktime_get_mono_fast_ns();
	struct gmpv_batch *batch;
	unsigned long flags;

	while (!READ_ONCE(pv->dead)) {
		spin_lock_irqsave(&pv->lock, flags);
		batch = take(pv);
		spin_unlock_irqrestore(&pv->lock, flags);
		if (batch)
			return batch;
		if (ktime_get_mono_fast_ns() - begin > LIMIT_NS)
			kill_queue(pv, "no batch has ended");
		cpu_relax();
	}
	return ERR_PTR(-EIO);
}
EXPORT_SYMBOL_GPL(gmpv_begin);

void *gmpv_batch_add(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes)
{
	struct gmpv_op_header *op = (void *)(batch->request + 1) + batch->bytes;
	size_t size = sizeof(*op) + bytes;

	if (batch->ops == GMPV_MAX_BATCH_OPS || sizeof(*batch->request) + batch->bytes + size > REQUEST_BYTES)
		return NULL;
	op->code = cpu_to_le16(code);
	op->units = cpu_to_le16(size / GMPV_UNIT);
	op->handle = cpu_to_le32(handle);
	memcpy(op + 1, body, bytes);
	batch->ops++;
	batch->bytes += size;
	batch->tail = op;
	return op + 1;
}

int gmpv_append(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes)
{
	if (bytes % GMPV_UNIT || bytes > REQUEST_BYTES)
		return -EINVAL;
	return gmpv_batch_add(batch, code, handle, body, bytes) ? 0 : -ENOSPC;
}
EXPORT_SYMBOL_GPL(gmpv_append);

static void hand_over(struct gmpv_batch *batch)
{
	unsigned long flags;

	spin_lock_irqsave(&batch->pv->lock, flags);
	publish(batch);
	spin_unlock_irqrestore(&batch->pv->lock, flags);
}

int gmpv_run(struct gmpv_batch *batch, u64 *value)
{
	if (!batch->ops) {
		release(batch);
		return 0;
	}
	hand_over(batch);
	return finish(batch, false, value);
}
EXPORT_SYMBOL_GPL(gmpv_run);

/* Submits the open batch if it has operations. The caller must hold the lock. */
static struct gmpv_batch *close_open(struct gmpv *pv)
{
	struct gmpv_batch *batch = pv->open;

	if (!batch || !batch->ops)
		return NULL;
	pv->open = NULL;
	publish(batch);
	return batch;
}

/* Calls @add with an open batch while holding the lock. On return, the lock is held if and only if the result is 0. */
static int with_open(struct gmpv *pv, int (*add)(struct gmpv_batch *, void *), void *data, unsigned long *flags)
{
	struct gmpv_batch *fresh, *full;
	int ret;

	for (;;) {
		spin_lock_irqsave(&pv->lock, *flags);
		if (pv->open) {
			ret = add(pv->open, data);
			if (!ret)
				return 0;
			full = ret == -ENOSPC ? close_open(pv) : NULL;
			spin_unlock_irqrestore(&pv->lock, *flags);
			if (!full)
				return ret;
			finish(full, true, NULL);
			continue;
		}
		spin_unlock_irqrestore(&pv->lock, *flags);
		fresh = gmpv_begin(pv);
		if (IS_ERR(fresh))
			return PTR_ERR(fresh);
		spin_lock_irqsave(&pv->lock, *flags);
		if (!pv->open) {
			pv->open = fresh;
			fresh = NULL;
		}
		spin_unlock_irqrestore(&pv->lock, *flags);
		if (fresh)
			release(fresh);
	}
}

void gmpv_with_open(struct gmpv *pv, int (*add)(struct gmpv_batch *batch, void *data), void *data)
{
	struct gmpv_batch *batch = NULL;
	unsigned long flags;

	if (with_open(pv, add, data, &flags))
		return;
	if (gmpv_naive)
		batch = close_open(pv);
	spin_unlock_irqrestore(&pv->lock, flags);
	if (batch)
		finish(batch, true, NULL);
}

struct operation {
	u16 code;
	u32 handle;
	const void *body;
	size_t bytes;
};

static int add_operation(struct gmpv_batch *batch, void *data)
{
	struct operation *op = data;

	return gmpv_append(batch, op->code, op->handle, op->body, op->bytes);
}

void gmpv_queue(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes)
{
	struct operation op = { code, handle, body, bytes };

	gmpv_with_open(pv, add_operation, &op);
}
EXPORT_SYMBOL_GPL(gmpv_queue);

int gmpv_queue_run(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes)
{
	struct operation op = { code, handle, body, bytes };
	struct gmpv_batch *batch;
	unsigned long flags;
	int ret;

	ret = with_open(pv, add_operation, &op, &flags);
	if (ret)
		return ret;
	batch = close_open(pv);
	spin_unlock_irqrestore(&pv->lock, flags);
	return finish(batch, true, NULL);
}
EXPORT_SYMBOL_GPL(gmpv_queue_run);

static void write64(struct gmpv *pv, u32 reg, u64 value)
{
	writel(lower_32_bits(value), pv->regs + reg);
	writel(upper_32_bits(value), pv->regs + reg + 4);
}

/* Configures the queue in the device. */
int gmpv_setup(struct gmpv *pv)
{
	struct vring *vring = &pv->vring;
	void *base = pv->ring;
	unsigned int i;
	u32 status;

	writel(GMPV_STATUS_RESET, pv->regs + GMPV_REGISTER_STATUS);
	memset(pv->ring, 0, vring_size(GMPV_QUEUE, RING_ALIGN));
	/* The driver polls for completions. */
	vring->avail->flags = le16(VRING_AVAIL_F_NO_INTERRUPT);
	pv->last_used = 0;
	pv->next_avail = 0;
	pv->open = NULL;
	for (i = 0; i < GMPV_SLOTS; i++)
		pv->batches[i].taken = false;
	writel(pv->features, pv->regs + GMPV_REGISTER_FEATURES);
	writel(GMPV_QUEUE, pv->regs + GMPV_REGISTER_QUEUE_SIZE);
	write64(pv, GMPV_REGISTER_QUEUE_DESCRIPTORS, pv->ring_dma + ((void *)vring->desc - base));
	write64(pv, GMPV_REGISTER_QUEUE_AVAILABLE, pv->ring_dma + ((void *)vring->avail - base));
	write64(pv, GMPV_REGISTER_QUEUE_USED, pv->ring_dma + ((void *)vring->used - base));
	writel(GMPV_STATUS_READY, pv->regs + GMPV_REGISTER_STATUS);
	status = readl(pv->regs + GMPV_REGISTER_STATUS);
	if (status != GMPV_STATUS_READY) {
		dev_err(pv->dev, "gpu-mediator: the device has not accepted the queue (status %#x)\n", status);
		return -EIO;
	}
	pv->dead = false;
	return 0;
}

int gmpv_queue_init(struct gmpv *pv)
{
	unsigned int i;

	pv->ring = dma_alloc_coherent(pv->dev, vring_size(GMPV_QUEUE, RING_ALIGN), &pv->ring_dma, GFP_KERNEL);
	if (!pv->ring)
		return -ENOMEM;
	vring_init(&pv->vring, GMPV_QUEUE, pv->ring, RING_ALIGN);
	for (i = 0; i < GMPV_SLOTS; i++) {
		struct gmpv_batch *batch = &pv->batches[i];

		batch->pv = pv;
		batch->index = i;
		batch->request = dma_alloc_coherent(pv->dev, REQUEST_BYTES, &batch->request_dma, GFP_KERNEL);
		batch->answer = dma_alloc_coherent(pv->dev, ANSWER_BYTES, &batch->answer_dma, GFP_KERNEL);
		if (!batch->request || !batch->answer)
			return -ENOMEM;
	}
	return 0;
}

void gmpv_queue_free(struct gmpv *pv)
{
	unsigned int i;

	for (i = 0; i < GMPV_SLOTS; i++) {
		struct gmpv_batch *batch = &pv->batches[i];

		if (batch->request)
			dma_free_coherent(pv->dev, REQUEST_BYTES, batch->request, batch->request_dma);
		if (batch->answer)
			dma_free_coherent(pv->dev, ANSWER_BYTES, batch->answer, batch->answer_dma);
	}
	if (pv->ring)
		dma_free_coherent(pv->dev, vring_size(GMPV_QUEUE, RING_ALIGN), pv->ring, pv->ring_dma);
}
