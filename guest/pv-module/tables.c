// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Page tables maintained by the device. Entries are combined into as few operations as possible. */

#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "priv.h"

/* Layout of gf100's entries. */
#define ADDRESS_SHIFT		12
#define HANDLE_MASK		0x0fffffffU
#define PDE_LARGE(entry)	((u32)((entry) >> 4) & HANDLE_MASK)
#define PDE_LARGE_TARGET(entry)	((u32)(entry) & 3)
#define PDE_SMALL(entry)	((u32)((entry) >> 36) & HANDLE_MASK)
#define PDE_SMALL_TARGET(entry)	((u32)((entry) >> 32) & 3)
#define PTE_VALID(entry)	((entry) & 1)
#define PTE_IN_VRAM(entry)	(((entry) >> 33 & 3) == 0)
#define PTE_ADDRESS(entry)	((u64)((u32)((entry) >> 4) & HANDLE_MASK) << ADDRESS_SHIFT)

#define SPACE_BITS	40
#define SPAN_SHIFT	27	/* of a directory entry */
#define LARGE_SHIFT	17
#define SMALL_SHIFT	12

/* Minimum length of a run that is shorter than a list of its entries, and thus justifies a separate operation. */
#define RUN_MIN		3

static u32 entries_of(u32 kind)
{
	switch (kind) {
	case GMPV_KIND_DIRECTORY: return 1 << (SPACE_BITS - SPAN_SHIFT);
	case GMPV_KIND_SMALL: return 1 << (SPAN_SHIFT - SMALL_SHIFT);
	case GMPV_KIND_LARGE: return 1 << (SPAN_SHIFT - LARGE_SHIFT);
	default: return 0;
	}
}

struct run {
	struct gmpv_table *table;
	u32 first, count;
	u64 entry, step;
};

static bool grows(struct gmpv_op_header *tail, u16 code, const struct run *run)
{
	struct gmpv_entries *at = (struct gmpv_entries *)(tail + 1);

	return tail->code == cpu_to_le16(code) && le32_to_cpu(at->first) + le32_to_cpu(at->count) == run->first;
}

static int add_zero(struct gmpv_batch *batch, const struct run *run)
{
	struct gmpv_op_header *tail = batch->tail;
	struct gmpv_entries body = { cpu_to_le32(run->first), cpu_to_le32(run->count) };

	if (tail && tail->handle == cpu_to_le32(run->table->handle) && grows(tail, GMPV_OP_ENTRIES_ZERO, run)) {
		le32_add_cpu(&((struct gmpv_entries *)(tail + 1))->count, run->count);
		return 0;
	}
	return gmpv_append(batch, GMPV_OP_ENTRIES_ZERO, run->table->handle, &body, sizeof(body));
}

/* Converts the last operation, which is a run of few entries, to a list of these entries and one more entry. */
static int make_list(struct gmpv_batch *batch, struct gmpv_op_header *tail, u64 entry)
{
	struct gmpv_entries_run was = *(struct gmpv_entries_run *)(tail + 1);
	u64 step = le64_to_cpu(was.step), value = le64_to_cpu(was.entry);
	u32 i, count = le32_to_cpu(was.count);
	size_t size = sizeof(*tail) + sizeof(struct gmpv_entries) + (count + 1) * sizeof(__le64);
	u32 before = (void *)tail - (void *)(batch->request + 1);
	struct gmpv_entries *at = (struct gmpv_entries *)(tail + 1);
	__le64 *list = (__le64 *)(at + 1);

	if (sizeof(*batch->request) + before + size > GMPV_MAX_BATCH_BYTES)
		return -ENOSPC;
	tail->code = cpu_to_le16(GMPV_OP_ENTRIES_LIST);
	tail->units = cpu_to_le16(size / GMPV_UNIT);
	at->count = cpu_to_le32(count + 1);
	for (i = 0; i < count; i++, value += step)
		list[i] = cpu_to_le64(value);
	list[count] = cpu_to_le64(entry);
	batch->bytes = before + size;
	return 0;
}

static int grow_list(struct gmpv_batch *batch, struct gmpv_op_header *tail, u64 entry)
{
	if (sizeof(*batch->request) + batch->bytes + sizeof(__le64) > GMPV_MAX_BATCH_BYTES)
		return -ENOSPC;
	*(__le64 *)((void *)(batch->request + 1) + batch->bytes) = cpu_to_le64(entry);
	batch->bytes += sizeof(__le64);
	le16_add_cpu(&tail->units, 1);
	le32_add_cpu(&((struct gmpv_entries *)(tail + 1))->count, 1);
	return 0;
}

static int add_run(struct gmpv_batch *batch, const struct run *run)
{
	struct gmpv_op_header *tail = batch->tail;
	struct gmpv_entries_run body = {
		cpu_to_le32(run->first), cpu_to_le32(run->count), cpu_to_le64(run->entry), cpu_to_le64(run->step),
	};

	if (tail && tail->handle == cpu_to_le32(run->table->handle)) {
		if (grows(tail, GMPV_OP_ENTRIES_RUN, run)) {
			struct gmpv_entries_run *was = (struct gmpv_entries_run *)(tail + 1);
			u32 count = le32_to_cpu(was->count);
			u64 begin = le64_to_cpu(was->entry);
			u64 step = count > 1 ? le64_to_cpu(was->step) : run->entry - begin;

			if (begin + count * step == run->entry && (run->count == 1 || run->step == step)) {
				was->step = cpu_to_le64(step);
				le32_add_cpu(&was->count, run->count);
				return 0;
			}
			if (run->count == 1 && count < RUN_MIN)
				return make_list(batch, tail, run->entry);
		}
		if (run->count == 1 && grows(tail, GMPV_OP_ENTRIES_LIST, run))
			return grow_list(batch, tail, run->entry);
	}
	return gmpv_append(batch, GMPV_OP_ENTRIES_RUN, run->table->handle, &body, sizeof(body));
}

static int add_entries(struct gmpv_batch *batch, void *data)
{
	const struct run *run = data;

	return run->entry || run->step ? add_run(batch, run) : add_zero(batch, run);
}

static void queue_run(struct run run)
{
	struct run one = run;

	atomic64_add(run.count, &run.table->pv->counters.entries);
	if (!gmpv_naive) {
		gmpv_with_open(run.table->pv, add_entries, &run);
		return;
	}
	for (one.count = 1; run.count--; one.first++, one.entry += one.step)
		gmpv_with_open(run.table->pv, add_entries, &one);
}

static void set_directory(struct gmpv_table *table, u32 index, u64 entry)
{
	struct gmpv_directory_set body = {
		.index = cpu_to_le32(index),
		.small = cpu_to_le32(PDE_SMALL_TARGET(entry) ? PDE_SMALL(entry) : 0),
		.large = cpu_to_le32(PDE_LARGE_TARGET(entry) ? PDE_LARGE(entry) : 0),
	};

	atomic64_inc(&table->pv->counters.entries);
	gmpv_queue(table->pv, GMPV_OP_DIRECTORY_SET, table->handle, &body, sizeof(body));
}

static bool in_table(struct gmpv_table *table, u32 first, u32 count)
{
	return !WARN_ON_ONCE(first > table->count || count > table->count - first);
}

struct gmpv_table *gmpv_table_create(struct gmpv *pv, u32 kind)
{
	struct gmpv_table_create body = { .kind = cpu_to_le32(kind) };
	struct gmpv_table *table;
	int ret;

	if (!entries_of(kind))
		return ERR_PTR(-EINVAL);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	table->pv = pv;
	table->kind = kind;
	table->count = entries_of(kind);
	table->entries = kvcalloc(table->count, sizeof(*table->entries), GFP_KERNEL);
	if (!table->entries) {
		kfree(table);
		return ERR_PTR(-ENOMEM);
	}
	mutex_lock(&pv->tables_lock);
	ret = xa_alloc(&pv->tables, &table->handle, table, XA_LIMIT(1, HANDLE_MASK), GFP_KERNEL);
	if (!ret) {
		ret = gmpv_queue_run(pv, GMPV_OP_TABLE_CREATE, table->handle, &body, sizeof(body));
		if (ret)
			xa_erase(&pv->tables, table->handle);
	}
	mutex_unlock(&pv->tables_lock);
	if (ret) {
		kvfree(table->entries);
		kfree(table);
		return ERR_PTR(ret);
	}
	return table;
}
EXPORT_SYMBOL_GPL(gmpv_table_create);

void gmpv_table_destroy(struct gmpv_table *table)
{
	struct gmpv *pv = table->pv;

	mutex_lock(&pv->tables_lock);
	gmpv_queue(pv, GMPV_OP_TABLE_DESTROY, table->handle, NULL, 0);
	/* The queue then makes a new table with the same handle. */
	xa_erase(&pv->tables, table->handle);
	mutex_unlock(&pv->tables_lock);
	kvfree(table->entries);
	kfree(table);
}
EXPORT_SYMBOL_GPL(gmpv_table_destroy);

u32 gmpv_table_bytes(const struct gmpv_table *table)
{
	return table->count * sizeof(*table->entries);
}
EXPORT_SYMBOL_GPL(gmpv_table_bytes);

u64 gmpv_table_address(const struct gmpv_table *table)
{
	return (u64)table->handle << ADDRESS_SHIFT;
}
EXPORT_SYMBOL_GPL(gmpv_table_address);

u64 gmpv_table_read(const struct gmpv_table *table, u32 index)
{
	return index < table->count ? table->entries[index] : 0;
}
EXPORT_SYMBOL_GPL(gmpv_table_read);

void gmpv_table_write(struct gmpv_table *table, u32 index, u64 entry)
{
	if (!in_table(table, index, 1))
		return;
	table->entries[index] = entry;
	if (table->kind == GMPV_KIND_DIRECTORY)
		set_directory(table, index, entry);
	else
		queue_run((struct run){ table, index, 1, entry, 0 });
}
EXPORT_SYMBOL_GPL(gmpv_table_write);

void gmpv_table_run(struct gmpv_table *table, u32 first, u32 count, u64 entry, u64 step)
{
	u32 i;

	if (!count || !in_table(table, first, count) || WARN_ON_ONCE(table->kind == GMPV_KIND_DIRECTORY))
		return;
	for (i = 0; i < count; i++)
		table->entries[first + i] = entry + i * step;
	queue_run((struct run){ table, first, count, entry, count > 1 ? step : 0 });
}
EXPORT_SYMBOL_GPL(gmpv_table_run);

void gmpv_table_zero(struct gmpv_table *table, u32 first, u32 count)
{
	if (!count || !in_table(table, first, count))
		return;
	memset(&table->entries[first], 0, count * sizeof(*table->entries));
	if (table->kind != GMPV_KIND_DIRECTORY) {
		queue_run((struct run){ table, first, count, 0, 0 });
		return;
	}
	while (count--)
		set_directory(table, first++, 0);
}
EXPORT_SYMBOL_GPL(gmpv_table_zero);

int gmpv_flush(struct gmpv *pv, const struct gmpv_table *directory)
{
	return gmpv_queue_run(pv, GMPV_OP_FLUSH, directory ? directory->handle : 0, NULL, 0);
}
EXPORT_SYMBOL_GPL(gmpv_flush);

static int bind(struct gmpv *pv, u64 instance, u32 handle)
{
	struct gmpv_instance body = { cpu_to_le64(instance) };

	return gmpv_queue_run(pv, GMPV_OP_DIRECTORY_BIND, handle, &body, sizeof(body));
}

int gmpv_instance_bind(struct gmpv *pv, u64 instance, struct gmpv_table *directory)
{
	unsigned long page = instance >> ADDRESS_SHIFT;
	int ret;

	mutex_lock(&pv->tables_lock);
	ret = directory ? xa_err(xa_store(&pv->bindings, page, directory, GFP_KERNEL)) : 0;
	if (!ret)
		ret = bind(pv, instance, directory ? directory->handle : 0);
	if (ret || !directory)
		xa_erase(&pv->bindings, page);
	mutex_unlock(&pv->tables_lock);
	return ret;
}
EXPORT_SYMBOL_GPL(gmpv_instance_bind);

/* Looks up @address. Returns its entry and the shift of its page, or 0 and the shift of the hole that contains it. */
static u64 walk(struct gmpv *pv, struct gmpv_table *directory, u64 address, u32 *shift)
{
	u64 pde = gmpv_table_read(directory, address >> SPAN_SHIFT), pte = 0;
	struct gmpv_table *small = NULL, *large = NULL;
	u64 offset = address & (BIT_ULL(SPAN_SHIFT) - 1);

	if (PDE_LARGE_TARGET(pde))
		large = xa_load(&pv->tables, PDE_LARGE(pde));
	if (PDE_SMALL_TARGET(pde))
		small = xa_load(&pv->tables, PDE_SMALL(pde));
	*shift = large || small ? SMALL_SHIFT : SPAN_SHIFT;
	if (large) {
		pte = gmpv_table_read(large, offset >> LARGE_SHIFT);
		if (PTE_VALID(pte)) {
			*shift = LARGE_SHIFT;
			return pte;
		}
	}
	pte = small ? gmpv_table_read(small, offset >> SMALL_SHIFT) : 0;
	return PTE_VALID(pte) ? pte : 0;
}

static int send_priority(struct gmpv *pv, struct gmpv_batch **batch, u64 from, u64 bytes, s32 priority)
{
	struct gmpv_buffer_priority body = {
		.address = cpu_to_le64(from), .bytes = cpu_to_le64(bytes), .priority = cpu_to_le32(priority),
	};
	int ret;

	for (;;) {
		if (!*batch) {
			struct gmpv_batch *fresh = gmpv_begin(pv);

			if (IS_ERR(fresh))
				return PTR_ERR(fresh);
			fresh->quiet = true;
			*batch = fresh;
		}
		ret = gmpv_append(*batch, GMPV_OP_BUFFER_PRIORITY, 0, &body, sizeof(body));
		if (ret != -ENOSPC && !gmpv_naive)
			return ret;
		ret = gmpv_run(*batch, NULL) ?: ret;
		*batch = NULL;
		if (ret != -ENOSPC)
			return ret;
	}
}

int gmpv_priority(struct gmpv *pv, struct gmpv_table *directory, u64 address, u64 bytes, s32 priority, u64 *reached)
{
	u64 end = address + bytes, from = 0, length = 0;
	struct gmpv_batch *batch = NULL;
	int ret = 0, last = 0;

	*reached = 0;
	if (!bytes || end < address || end > BIT_ULL(SPACE_BITS))
		return -EINVAL;
	while (address < end && !ret) {
		u32 shift;
		u64 pte = walk(pv, directory, address, &shift);
		u64 next = min(end, (address | (BIT_ULL(shift) - 1)) + 1);

		if (pte && PTE_IN_VRAM(pte)) {
			u64 page = PTE_ADDRESS(pte) + (address & (BIT_ULL(shift) - 1));

			if (!length || from + length != page) {
				if (length)
					ret = send_priority(pv, &batch, from, length, priority);
				from = page;
				length = 0;
			}
			length += next - address;
			*reached += next - address;
		}
		address = next;
		if (fatal_signal_pending(current))
			ret = -EINTR;
		cond_resched();
	}
	if (length && !ret)
		ret = send_priority(pv, &batch, from, length, priority);
	if (batch)
		last = gmpv_run(batch, NULL);
	return ret ?: last;
}

/* Writes the complete state to a device that has lost it. */
void gmpv_tables_restore(struct gmpv *pv)
{
	struct gmpv_table *table;
	unsigned long index;
	u32 i;

	mutex_lock(&pv->tables_lock);
	xa_for_each(&pv->tables, index, table) {
		struct gmpv_table_create body = { .kind = cpu_to_le32(table->kind) };

		gmpv_queue(pv, GMPV_OP_TABLE_CREATE, table->handle, &body, sizeof(body));
	}
	xa_for_each(&pv->tables, index, table) {
		for (i = 0; i < table->count; i++) {
			if (table->entries[i])
				gmpv_table_write(table, i, table->entries[i]);
		}
	}
	xa_for_each(&pv->bindings, index, table)
		bind(pv, (u64)index << ADDRESS_SHIFT, table->handle);
	mutex_unlock(&pv->tables_lock);
}

void gmpv_tables_free(struct gmpv *pv)
{
	struct gmpv_table *table;
	unsigned long index;

	xa_for_each(&pv->tables, index, table)
		dev_warn(pv->dev, "gpu-mediator: table %#x is still in use\n", table->handle);
	xa_destroy(&pv->tables);
	xa_destroy(&pv->bindings);
}
