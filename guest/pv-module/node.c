// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * /dev/gpu-mediator: segments shared by channels, queries, and priorities, for programs.
 *
 * The device distinguishes only virtual machines. This file determines the rights of users in this guest. A segment
 * belongs to the first user that got it in this guest, and a channel belongs to the process that created it.
 */

#include <linux/compat.h>
#include <linux/cred.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/uidgid.h>

#include "gpu_mediator_uapi.h"
#include "priv.h"

#define MODE_MASK	0606
#define MODE_READ	4
#define MODE_WRITE	2
/* Maximum number of segments per user, and maximum number of attachments per file. */
#define MAX_OWNED	256
#define MAX_ATTACHED	256

struct segment {
	u32 id;
	u32 mode;
	kuid_t owner;
	/* Set if the segment has no key. It is then freed when no channel has it attached. */
	bool removed;
	unsigned int attached;
};

struct attachment {
	struct list_head node;
	struct segment *segment;
	u32 channel;
};

struct file_state {
	struct gmpv *pv;
	struct list_head node;
	struct list_head attachments;
	unsigned int attached;
};

/* Runs a single operation. The caller must handle a rejection. */
static int run_one(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes, u64 *value)
{
	struct gmpv_batch *batch = gmpv_begin(pv);
	int ret;

	if (IS_ERR(batch))
		return PTR_ERR(batch);
	batch->quiet = true;
	ret = gmpv_append(batch, code, handle, body, bytes);
	if (ret)
		WARN_ON_ONCE(1);
	return gmpv_run(batch, value) ?: ret;
}

static bool owns(const struct segment *segment)
{
	return uid_eq(segment->owner, current_euid()) || capable(CAP_IPC_OWNER);
}

static bool may(const struct segment *segment, u32 access)
{
	u32 granted = uid_eq(segment->owner, current_euid()) ? segment->mode >> 6 : segment->mode;

	return (granted & access) == access || capable(CAP_IPC_OWNER);
}

/* Removes the segment's key. */
static void remove(struct gmpv *pv, struct segment *segment)
{
	xa_erase(&pv->segments, segment->id);
	if (segment->attached)
		segment->removed = true;
	else
		kfree(segment);
}

static void drop(struct file_state *state, struct attachment *attachment)
{
	struct segment *segment = attachment->segment;

	if (!--segment->attached && segment->removed)
		kfree(segment);
	list_del(&attachment->node);
	state->attached--;
	kfree(attachment);
}

/* The caller must hold users_lock. */
static struct segment *lookup(struct gmpv *pv, u32 id)
{
	return xa_load(&pv->segments, id) ?: ERR_PTR(-ENOENT);
}

static unsigned int owned_by_caller(struct gmpv *pv)
{
	struct segment *segment;
	unsigned long index;
	unsigned int count = 0;

	xa_for_each(&pv->segments, index, segment)
		count += uid_eq(segment->owner, current_euid());
	return count;
}

static int share_get(struct file_state *state, struct gpu_mediator_share_get *args)
{
	struct gmpv *pv = state->pv;
	struct gmpv_share_get body = {
		.key = cpu_to_le64(args->key),
		.bytes = cpu_to_le64(args->bytes),
		.flags = cpu_to_le32(args->flags),
		.mode = cpu_to_le32(args->abroad),
	};
	struct segment *segment, *fresh;
	u64 id;
	int ret;

	if (args->mode & ~MODE_MASK)
		return -EINVAL;
	if (owned_by_caller(pv) >= MAX_OWNED)
		return -ENOSPC;
	fresh = kzalloc(sizeof(*fresh), GFP_KERNEL_ACCOUNT);
	if (!fresh)
		return -ENOMEM;
	ret = run_one(pv, GMPV_OP_SHARE_GET, 0, &body, sizeof(body), &id);
	if (!ret && upper_32_bits(id))
		ret = -EIO;
	if (ret) {
		kfree(fresh);
		return ret;
	}
	args->id = id;
	segment = xa_load(&pv->segments, args->id);
	if (segment) {
		kfree(fresh);
		return may(segment, MODE_READ) || may(segment, MODE_WRITE) ? 0 : -EACCES;
	}
	fresh->id = args->id;
	fresh->mode = args->mode;
	fresh->owner = current_euid();
	ret = xa_err(xa_store(&pv->segments, fresh->id, fresh, GFP_KERNEL_ACCOUNT));
	if (ret)
		kfree(fresh);
	return ret;
}

static void detach(struct gmpv *pv, struct file_state *state, struct attachment *attachment)
{
	struct gmpv_share_attach body = { .channel = cpu_to_le32(attachment->channel) };

	run_one(pv, GMPV_OP_SHARE_DETACH, attachment->segment->id, &body, sizeof(body), NULL);
	drop(state, attachment);
}

static int share_attach(struct file_state *state, struct gpu_mediator_share_attach *args)
{
	struct gmpv_share_attach body = { cpu_to_le32(args->channel), cpu_to_le32(args->flags) };
	struct gmpv *pv = state->pv;
	struct gmpv_channel *channel = gmpv_channel_of_caller(pv, args->channel);
	struct segment *segment = lookup(pv, args->id);
	struct attachment *attachment;
	int ret;

	if (IS_ERR(channel))
		return PTR_ERR(channel);
	if (IS_ERR(segment))
		return PTR_ERR(segment);
	if (args->reserved || args->flags & ~GMPV_SHARE_READ_ONLY)
		return -EINVAL;
	if (!may(segment, MODE_READ | (args->flags & GMPV_SHARE_READ_ONLY ? 0 : MODE_WRITE)))
		return -EACCES;
	if (state->attached >= MAX_ATTACHED)
		return -ENOSPC;
	attachment = kzalloc(sizeof(*attachment), GFP_KERNEL_ACCOUNT);
	if (!attachment)
		return -ENOMEM;
	ret = run_one(pv, GMPV_OP_SHARE_ATTACH, segment->id, &body, sizeof(body), &args->address);
	if (ret) {
		kfree(attachment);
		return ret;
	}
	attachment->segment = segment;
	attachment->channel = args->channel;
	segment->attached++;
	state->attached++;
	list_add(&attachment->node, &state->attachments);
	return 0;
}

static int share_detach(struct file_state *state, struct gpu_mediator_share_detach *args)
{
	struct attachment *attachment;

	list_for_each_entry(attachment, &state->attachments, node) {
		if (attachment->segment->id == args->id && attachment->channel == args->channel) {
			detach(state->pv, state, attachment);
			return 0;
		}
	}
	return -ENOENT;
}

static int share_control(struct file_state *state, struct gpu_mediator_share_control *args)
{
	struct gmpv_share_control body = { cpu_to_le32(args->command), cpu_to_le32(args->argument) };
	struct gmpv *pv = state->pv;
	struct segment *segment = lookup(pv, args->id);
	bool asks = args->command == GMPV_SHARE_CONTROL_SIZE || args->command == GMPV_SHARE_CONTROL_ATTACHED ||
		    args->command == GMPV_SHARE_CONTROL_MODE;
	int ret;

	if (IS_ERR(segment))
		return PTR_ERR(segment);
	if (args->reserved)
		return -EINVAL;
	if (asks ? !may(segment, MODE_READ) : !owns(segment))
		return -EACCES;
	ret = run_one(pv, GMPV_OP_SHARE_CONTROL, segment->id, &body, sizeof(body), &args->value);
	/* The segment's owner in another virtual machine may also have removed it. */
	if (args->command == GMPV_SHARE_CONTROL_REMOVE ? !ret : ret == -ENOENT)
		remove(pv, segment);
	return ret;
}

static int query(struct file_state *state, struct gpu_mediator_query *args)
{
	if (args->reserved)
		return -EINVAL;
	return run_one(state->pv, GMPV_OP_QUERY, args->what, NULL, 0, &args->value);
}

static int priority(struct file_state *state, struct gpu_mediator_priority *args)
{
	struct gmpv *pv = state->pv;
	struct gmpv_channel *channel = gmpv_channel_of_caller(pv, args->channel);
	struct gmpv_table *directory;
	int ret;

	if (IS_ERR(channel))
		return PTR_ERR(channel);
	mutex_lock(&pv->tables_lock);
	directory = xa_load(&pv->bindings, channel->instance >> 12);
	ret = directory ? gmpv_priority(pv, directory, args->address, args->bytes, args->priority, &args->reached) :
			  -EOPNOTSUPP;
	mutex_unlock(&pv->tables_lock);
	return ret;
}

static long gmpv_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct file_state *state = file->private_data;
	union {
		struct gpu_mediator_share_get get;
		struct gpu_mediator_share_attach attach;
		struct gpu_mediator_share_detach detach;
		struct gpu_mediator_share_control control;
		struct gpu_mediator_query query;
		struct gpu_mediator_priority priority;
	} args;
	void __user *user = (void __user *)argument;
	struct gmpv *pv = state->pv;
	long ret;

	if (_IOC_TYPE(command) != 'M' || _IOC_SIZE(command) > sizeof(args))
		return -ENOTTY;
	if (copy_from_user(&args, user, _IOC_SIZE(command)))
		return -EFAULT;
	mutex_lock(&pv->users_lock);
	if (!pv->number) {
		ret = -ENODEV;
	} else {
		switch (command) {
		case GPU_MEDIATOR_SHARE_GET: ret = share_get(state, &args.get); break;
		case GPU_MEDIATOR_SHARE_ATTACH: ret = share_attach(state, &args.attach); break;
		case GPU_MEDIATOR_SHARE_DETACH: ret = share_detach(state, &args.detach); break;
		case GPU_MEDIATOR_SHARE_CONTROL: ret = share_control(state, &args.control); break;
		case GPU_MEDIATOR_QUERY: ret = query(state, &args.query); break;
		case GPU_MEDIATOR_PRIORITY: ret = priority(state, &args.priority); break;
		default: ret = -ENOTTY;
		}
	}
	mutex_unlock(&pv->users_lock);
	if (!ret && _IOC_DIR(command) & _IOC_READ && copy_to_user(user, &args, _IOC_SIZE(command)))
		ret = -EFAULT;
	return ret;
}

static int gmpv_open(struct inode *inode, struct file *file)
{
	struct gmpv *pv = container_of(file->private_data, struct gmpv, misc);
	struct file_state *state = kzalloc(sizeof(*state), GFP_KERNEL_ACCOUNT);

	if (!state)
		return -ENOMEM;
	/* The node exists while it is being opened, because misc_deregister() waits for the open to complete. */
	gmpv_get(pv);
	state->pv = pv;
	INIT_LIST_HEAD(&state->attachments);
	mutex_lock(&pv->users_lock);
	list_add(&state->node, &pv->files);
	mutex_unlock(&pv->users_lock);
	file->private_data = state;
	return 0;
}

static int gmpv_release(struct inode *inode, struct file *file)
{
	struct file_state *state = file->private_data;
	struct attachment *attachment, *next;
	struct gmpv *pv = state->pv;

	mutex_lock(&pv->users_lock);
	list_for_each_entry_safe(attachment, next, &state->attachments, node)
		detach(pv, state, attachment);
	list_del(&state->node);
	mutex_unlock(&pv->users_lock);
	kfree(state);
	gmpv_put(pv);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = gmpv_open,
	.release = gmpv_release,
	.unlocked_ioctl = gmpv_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

void gmpv_node_channel_gone(struct gmpv *pv, u32 channel)
{
	struct attachment *attachment, *next;
	struct file_state *state;

	list_for_each_entry(state, &pv->files, node) {
		list_for_each_entry_safe(attachment, next, &state->attachments, node) {
			if (attachment->channel == channel)
				detach(pv, state, attachment);
		}
	}
}

int gmpv_node_add(struct gmpv *pv)
{
	if (pv->number == 1)
		strscpy(pv->misc_name, "gpu-mediator", sizeof(pv->misc_name));
	else
		snprintf(pv->misc_name, sizeof(pv->misc_name), "gpu-mediator%d", pv->number);
	pv->misc.minor = MISC_DYNAMIC_MINOR;
	pv->misc.name = pv->misc_name;
	pv->misc.fops = &operations;
	pv->misc.mode = 0660;
	pv->misc.parent = pv->dev;
	return misc_register(&pv->misc);
}

void gmpv_node_remove(struct gmpv *pv)
{
	struct attachment *attachment, *next;
	struct file_state *state;
	struct segment *segment;
	unsigned long index;

	misc_deregister(&pv->misc);
	mutex_lock(&pv->users_lock);
	list_for_each_entry(state, &pv->files, node) {
		list_for_each_entry_safe(attachment, next, &state->attachments, node)
			drop(state, attachment);
	}
	xa_for_each(&pv->segments, index, segment)
		remove(pv, segment);
	xa_destroy(&pv->segments);
	/* From now on, calls on open files return ENODEV. */
	pv->number = 0;
	mutex_unlock(&pv->users_lock);
}
