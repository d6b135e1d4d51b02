// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* State of channels in the device, and the owners of channels. */

#include <linux/sched.h>
#include <linux/slab.h>

#include "priv.h"

static struct gmpv_channel *find(struct gmpv *pv, u32 number)
{
	return xa_load(&pv->channels, number);
}

struct gmpv_channel *gmpv_channel_of_caller(struct gmpv *pv, u32 number)
{
	struct gmpv_channel *channel = find(pv, number);

	if (!channel || !channel->created)
		return ERR_PTR(-ENOENT);
	return channel->owner == task_tgid(current) ? channel : ERR_PTR(-EACCES);
}

static void forget(struct gmpv *pv, struct gmpv_channel *channel)
{
	xa_erase(&pv->channels, channel->number);
	put_pid(channel->owner);
	kfree(channel);
}

int gmpv_channel_open(struct gmpv *pv, u32 number)
{
	struct gmpv_channel *channel = kzalloc(sizeof(*channel), GFP_KERNEL);
	int ret;

	if (!channel)
		return -ENOMEM;
	channel->number = number;
	channel->owner = get_task_pid(current, PIDTYPE_TGID);
	mutex_lock(&pv->users_lock);
	ret = xa_insert(&pv->channels, number, channel, GFP_KERNEL);
	if (ret) {
		put_pid(channel->owner);
		kfree(channel);
	} else {
		ret = gmpv_queue_run(pv, GMPV_OP_CHANNEL_CREATE, number, NULL, 0);
		channel->created = !ret;
		if (ret)
			forget(pv, channel);
	}
	mutex_unlock(&pv->users_lock);
	return ret;
}
EXPORT_SYMBOL_GPL(gmpv_channel_open);

void gmpv_channel_bind(struct gmpv *pv, u32 number, u64 instance)
{
	struct gmpv_instance body = { cpu_to_le64(instance) };
	struct gmpv_channel *channel;

	mutex_lock(&pv->users_lock);
	channel = find(pv, number);
	if (!WARN_ON(!channel)) {
		/* The channel was unbound after it was opened. */
		if (!channel->created)
			gmpv_queue(pv, GMPV_OP_CHANNEL_CREATE, number, NULL, 0);
		channel->created = true;
		channel->instance = instance;
		gmpv_queue(pv, GMPV_OP_CHANNEL_BIND, number, &body, sizeof(body));
	}
	mutex_unlock(&pv->users_lock);
}
EXPORT_SYMBOL_GPL(gmpv_channel_bind);

/* Makes the device release the channel. The caller must hold users_lock. */
static void destroy(struct gmpv *pv, struct gmpv_channel *channel)
{
	if (!channel->created)
		return;
	gmpv_node_channel_gone(pv, channel->number);
	gmpv_queue_run(pv, GMPV_OP_CHANNEL_DESTROY, channel->number, NULL, 0);
	channel->created = false;
}

void gmpv_channel_unbind(struct gmpv *pv, u32 number)
{
	struct gmpv_channel *channel;

	mutex_lock(&pv->users_lock);
	channel = find(pv, number);
	if (channel)
		destroy(pv, channel);
	mutex_unlock(&pv->users_lock);
}
EXPORT_SYMBOL_GPL(gmpv_channel_unbind);

void gmpv_channel_close(struct gmpv *pv, u32 number)
{
	struct gmpv_channel *channel;

	mutex_lock(&pv->users_lock);
	channel = find(pv, number);
	if (channel) {
		destroy(pv, channel);
		forget(pv, channel);
	}
	mutex_unlock(&pv->users_lock);
}
EXPORT_SYMBOL_GPL(gmpv_channel_close);

int gmpv_runlist(struct gmpv *pv, const u32 *channels, u32 count)
{
	size_t bytes = sizeof(struct gmpv_runlist) + round_up(count * sizeof(__le32), GMPV_UNIT);
	struct gmpv_runlist *body;
	__le32 *list;
	u32 i;
	int ret;

	if (bytes > GMPV_MAX_BATCH_BYTES / 2)
		return -EINVAL;
	body = kzalloc(bytes, GFP_ATOMIC);
	if (!body)
		return -ENOMEM;
	body->count = cpu_to_le32(count);
	list = (__le32 *)(body + 1);
	for (i = 0; i < count; i++)
		list[i] = cpu_to_le32(channels[i]);
	ret = gmpv_queue_run(pv, GMPV_OP_RUNLIST, 0, body, bytes);
	kfree(body);
	return ret;
}
EXPORT_SYMBOL_GPL(gmpv_runlist);

/* Records that the device has lost all channels, which are created again when they are bound. */
void gmpv_channels_forget(struct gmpv *pv)
{
	struct gmpv_channel *channel;
	unsigned long index;

	mutex_lock(&pv->users_lock);
	xa_for_each(&pv->channels, index, channel)
		channel->created = false;
	mutex_unlock(&pv->users_lock);
}

void gmpv_channels_free(struct gmpv *pv)
{
	struct gmpv_channel *channel;
	unsigned long index;

	xa_for_each(&pv->channels, index, channel)
		forget(pv, channel);
	xa_destroy(&pv->channels);
}
