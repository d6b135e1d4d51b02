//! Tests the effects of each request over a real socket.

mod support;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;

use support::*;
use vmm_glue::client::{CLOUD_HYPERVISOR_CAPABILITIES, Client, memory_file, multi_body, wait_event, write_body};
use vmm_glue::protocol::{
    Command, DmaMap, DmaUnmap, FLAG_ERROR, FLAG_NO_REPLY, HEADER_SIZE, Header, IRQ_INFO_AUTOMASKED, IRQ_INFO_EVENTFD,
    IRQ_INFO_MASKABLE, RegionAccess,
};
use vmm_glue::{RegionIndex, ServerOptions};
use zerocopy::IntoBytes;

const BAR0: u32 = 0;
const ROM: u32 = 6;
const CONFIG: u32 = 7;

/// Returns the event that reports a completed write of `value`.
fn completed(value: u32) -> Event {
    Event::Completed(value.to_le_bytes().to_vec())
}

#[test]
fn device_info_names_nine_regions_and_five_interrupt_types() {
    let host = Host::start();
    let info = host.client().device_info().unwrap();
    assert_eq!((info.argsz, info.flags, info.num_regions, info.num_irqs), (16, 3, 9, 5));
}

#[test]
fn region_info_gives_sizes_and_rights() {
    let host = Host::start();
    let mut client = host.client();
    let info = |client: &mut Client, index| {
        let (info, caps, fds) = client.region_info(index, 32).unwrap();
        assert!(caps.is_empty() && fds.is_empty());
        (info.size, info.flags)
    };
    assert_eq!(info(&mut client, BAR0), (BAR0_SIZE, 3));
    assert_eq!(info(&mut client, 2), (0, 0));
    assert_eq!(info(&mut client, ROM), (0x1000, 1));
    assert_eq!(client.region_info(9, 32).unwrap_err().errno(), EINVAL);
}

#[test]
fn irq_info_reports_counts_and_intx_automask() {
    let host = Host::start();
    let mut client = host.client();
    let intx = client.irq_info(0).unwrap();
    assert_eq!((intx.count, intx.flags), (1, IRQ_INFO_EVENTFD | IRQ_INFO_MASKABLE | IRQ_INFO_AUTOMASKED));
    assert_eq!(client.irq_info(1).unwrap().count, 4);
    assert_eq!(client.irq_info(3).unwrap().count, 0);
    assert_eq!(client.irq_info(5).unwrap_err().errno(), EINVAL);
}

#[test]
fn writes_can_be_read_back() {
    let host = Host::start();
    let mut client = host.client();
    client.write32(BAR0, 0x40, 0x1234_5678).unwrap();
    assert_eq!(client.read32(BAR0, 0x40).unwrap(), 0x1234_5678);
    host.expect(Event::Write(RegionIndex::Bar0, 0x40, vec![0x78, 0x56, 0x34, 0x12]));
    host.expect(Event::Read(RegionIndex::Bar0, 0x40, 4));
}

#[test]
fn deferred_write_is_completed_after_its_reply() {
    let (let_go, held) = channel();
    let host = Host::start_with(ServerOptions::default(), |device| device.held_completion = Some(held));
    let mut client = host.client();
    client.write32(BAR0, DEFERRED_WRITE_AT, 1).unwrap();
    assert!(host.quiet(), "the reply was sent, but the write is incomplete");
    let_go.send(()).unwrap();
    host.expect(completed(1));
    // Send consecutive requests, and disconnect after the last.
    for value in 2..5 {
        let_go.send(()).unwrap();
        client.write32(BAR0, DEFERRED_WRITE_AT, value).unwrap();
    }
    drop(client);
    (2..5).for_each(|value| host.expect(completed(value)));
    host.expect(Event::Disconnected);
}

#[test]
fn message_after_deferred_write_finds_it_completed() {
    let host = Host::start();
    let mut client = host.client();
    let (gpa, size) = (0x10_0000, 0x1000);
    let read = RegionAccess { offset: 0x40, region: BAR0, count: 4 }.as_bytes().to_vec();
    let map = DmaMap { argsz: 32, flags: 3, offset: 0, address: gpa, size }.as_bytes().to_vec();
    let unmap = DmaUnmap { argsz: 24, flags: 0, address: gpa, size }.as_bytes().to_vec();
    let write = write_body(CONFIG, 4, &[6, 0, 0, 0]);
    let messages = [
        (Command::REGION_READ, read, Event::Read(RegionIndex::Bar0, 0x40, 4)),
        (Command::DMA_MAP, map, Event::Map { gpa, size, readable: true, writable: true, mapped: false }),
        (Command::DMA_UNMAP, unmap, Event::Unmap { gpa, size }),
        (Command::REGION_WRITE, write, Event::Write(RegionIndex::Config, 4, vec![6, 0, 0, 0])),
        (Command::DEVICE_RESET, Vec::new(), Event::Reset),
    ];
    let message = |id: u16, command, body: &[u8]| {
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        [Header::request(id, command, size, 0).as_bytes(), body].concat()
    };
    for (value, (command, body, event)) in (1u32..).zip(messages) {
        // The server receives both messages before it replies to the first.
        let deferred = write_body(BAR0, DEFERRED_WRITE_AT, &value.to_le_bytes());
        let both = [message(100, Command::REGION_WRITE, &deferred), message(101, command, &body)].concat();
        client.send_raw(&both, &[]).unwrap();
        [100, 101].into_iter().for_each(|id| drop(client.reply(id).unwrap()));
        host.expect(completed(value));
        host.expect(event);
    }
}

#[test]
fn write_without_awaited_answer_is_completed_at_once() {
    let host = Host::start();
    let mut client = host.client();
    client.post(BAR0, DEFERRED_WRITE_AT, &1u32.to_le_bytes()).unwrap();
    client.post_many(&[(BAR0, DEFERRED_WRITE_AT, &2u32.to_le_bytes()), (BAR0, 0, &[7])]).unwrap();
    // Send one write that is split into two parts, the first of which is deferred.
    client.write(BAR0, DEFERRED_WRITE_AT, &[3, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9]).unwrap();
    host.expect(completed(1));
    host.expect(completed(2));
    host.expect(Event::Write(RegionIndex::Bar0, 0, vec![7]));
    host.expect(Event::Completed(vec![3, 0, 0, 0, 0, 0, 0, 0]));
    host.expect(Event::Write(RegionIndex::Bar0, DEFERRED_WRITE_AT + 8, vec![9; 4]));
}

#[test]
fn posted_writes_are_done_before_a_read_that_follows() {
    let host = Host::start();
    let mut client = host.client();
    for value in 0..1000u32 {
        client.post(BAR0, 0x40, &value.to_le_bytes()).unwrap();
    }
    assert_eq!(client.read32(BAR0, 0x40).unwrap(), 999);
    assert_eq!(host.link.counters().posted.load(Relaxed), 1000);
}

#[test]
fn batched_writes_are_all_done_in_order() {
    let host = Host::start();
    let mut client = host.client();
    let values: Vec<[u8; 8]> = (0..200u64).map(u64::to_le_bytes).collect();
    let writes: Vec<_> = (0u64..).zip(&values).map(|(at, value)| (BAR0, at * 8, &value[..])).collect();
    client.post_many(&writes).unwrap();
    client.post_many(&[(BAR0, 0, &[7]), (BAR0, 0, &[8, 9])]).unwrap();
    let mut all = vec![0; 1600];
    client.read(BAR0, 0, &mut all).unwrap();
    assert_eq!(all[..8], [8, 9, 0, 0, 0, 0, 0, 0]);
    assert_eq!(all[8..], values[1..].concat());
    assert_eq!(host.link.counters().batched_writes.load(Relaxed), 202);
}

#[test]
fn batch_with_reply_reports_number_of_writes_done() {
    let host = Host::start();
    let mut client = host.client();
    let body = multi_body(&[(BAR0, 0, &[1; 4]), (BAR0, 4, &[2; 4])]);
    let reply = client.request(Command::REGION_WRITE_MULTI, &body, &[]).unwrap();
    assert_eq!(reply.body, 2u64.to_ne_bytes());
}

#[test]
fn bad_write_in_a_batch_does_not_stop_the_others() {
    let host = Host::start();
    let mut client = host.client();
    let body = multi_body(&[(BAR0, DENIED, &[1; 4]), (99, 0, &[1; 4]), (BAR0, 4, &[2; 4])]);
    assert_eq!(client.request(Command::REGION_WRITE_MULTI, &body, &[]).unwrap_err().errno(), EACCES);
    assert_eq!(client.read32(BAR0, 4).unwrap(), 0x0202_0202);
}

#[test]
fn batch_with_mismatched_count_and_size_is_rejected_whole() {
    let host = Host::start();
    let mut client = host.client();
    let good = multi_body(&[(BAR0, 0, &[1; 4])]);
    let mut refused = |body: &[u8]| client.request(Command::REGION_WRITE_MULTI, body, &[]).unwrap_err().errno();
    assert_eq!(refused(&[&5u64.to_ne_bytes()[..], &good[8..]].concat()), EINVAL);
    assert_eq!(refused(&[&u64::MAX.to_ne_bytes()[..], &good[8..]].concat()), EINVAL);
    assert_eq!(refused(&good[..good.len() - 1]), EINVAL);
    assert_eq!(refused(&good[..7]), EINVAL);
    // The count exceeds the 8 bytes of one write.
    let mut nine = good.clone();
    nine[8 + 12] = 9;
    assert_eq!(refused(&nine), EINVAL);
    assert!(host.quiet(), "the device received none of these calls");
}

#[test]
fn odd_accesses_reach_the_device_in_aligned_pieces() {
    let host = Host::start();
    let mut client = host.client();
    client.write(BAR0, 3, &[1, 2, 3, 4]).unwrap();
    host.expect(Event::Write(RegionIndex::Bar0, 3, vec![1]));
    host.expect(Event::Write(RegionIndex::Bar0, 4, vec![2, 3]));
    host.expect(Event::Write(RegionIndex::Bar0, 6, vec![4]));
    let mut config = vec![0; 256];
    client.read(CONFIG, 0, &mut config).unwrap();
    for offset in (0..256).step_by(8) {
        host.expect(Event::Read(RegionIndex::Config, offset, 8));
    }
}

#[test]
fn out_of_region_access_is_rejected_and_connection_continues() {
    let host = Host::start();
    let mut client = host.client();
    let mut refused = |region, offset, count| {
        let body = RegionAccess { offset, region, count };
        client.request(Command::REGION_READ, body.as_bytes(), &[]).unwrap_err().errno()
    };
    assert_eq!(refused(BAR0, BAR0_SIZE - 3, 4), EINVAL);
    assert_eq!(refused(BAR0, BAR0_SIZE, 1), EINVAL);
    assert_eq!(refused(BAR0, u64::MAX, 4), EINVAL);
    assert_eq!(refused(BAR0, 0, 0), EINVAL);
    assert_eq!(refused(BAR0, 0, u32::MAX), EINVAL);
    assert_eq!(refused(2, 0, 4), EINVAL);
    assert_eq!(refused(9, 0, 4), EINVAL);
    assert_eq!(refused(u32::MAX, 0, 4), EINVAL);
    assert!(host.quiet());
    assert_eq!(client.read32(BAR0, 0).unwrap(), 0);
    assert_eq!(host.link.counters().errors.load(Relaxed), 8);
}

#[test]
fn write_to_a_read_only_region_is_refused() {
    let host = Host::start();
    assert_eq!(host.client().write32(ROM, 0, 1).unwrap_err().errno(), EACCES);
}

#[test]
fn write_with_mismatched_data_and_count_is_rejected() {
    let host = Host::start();
    let mut client = host.client();
    let mut body = write_body(BAR0, 0, &[1; 8]);
    body.pop();
    assert_eq!(client.request(Command::REGION_WRITE, &body, &[]).unwrap_err().errno(), EINVAL);
    assert_eq!(client.request(Command::REGION_WRITE, &body[..10], &[]).unwrap_err().errno(), EINVAL);
}

#[test]
fn access_that_the_device_denies_is_an_error_and_counted() {
    let host = Host::start();
    let mut client = host.client();
    assert_eq!(client.read32(BAR0, DENIED).unwrap_err().errno(), EACCES);
    assert_eq!(host.link.counters().denied.load(Relaxed), 1);
}

#[test]
fn posted_write_that_fails_gets_no_reply_but_is_counted() {
    let host = Host::start();
    let mut client = host.client();
    client.post(BAR0, DENIED, &[0; 4]).unwrap();
    client.post(42, 0, &[0; 4]).unwrap();
    assert_eq!(client.read32(BAR0, 0).unwrap(), 0, "the next reply is that of the read");
    assert_eq!(host.link.counters().posted_errors.load(Relaxed), 2);
}

#[test]
fn unsupported_commands_return_errors_that_block_migration() {
    let host = Host::start();
    let mut client = host.client();
    let mut refused = |number| client.request(Command(number), &[0; 32], &[]).unwrap_err().errno();
    assert_eq!(refused(Command::DEVICE_FEATURE.0), ENOTTY);
    assert_eq!(refused(Command::MIG_DATA_READ.0), ENOTTY);
    assert_eq!(refused(Command::DIRTY_PAGES.0), ENOTSUP);
    assert_eq!(refused(Command::DEVICE_GET_REGION_IO_FDS.0), ENOTSUP);
    assert_eq!(refused(Command::DMA_READ.0), EINVAL);
    assert_eq!(refused(Command::VERSION.0), EINVAL);
    assert_eq!(refused(0), ENOSYS);
    assert_eq!(refused(19), ENOSYS);
    assert_eq!(refused(0xffff), ENOSYS);
    assert_eq!(host.link.counters().snapshot().messages["unknown"], 3);
}

#[test]
fn oversized_message_is_answered_and_skipped() {
    let host = Host::start();
    let mut client = host.client();
    let body = write_body(BAR0, 0, &vec![1; 1 << 20]);
    assert_eq!(client.request(Command::REGION_WRITE, &body, &[]).unwrap_err().errno(), E2BIG);
    assert_eq!(client.read32(BAR0, 0).unwrap(), 0);
}

#[test]
fn largest_transfer_goes_both_ways() {
    let host = Host::start();
    let mut client = host.client();
    let data: Vec<u8> = (0..BAR0_SIZE).map(|at| (at % 251) as u8).collect();
    client.write(BAR0, 0, &data[..DENIED as usize]).unwrap();
    let mut back = vec![0; DENIED as usize];
    client.read(BAR0, 0, &mut back).unwrap();
    assert_eq!(back, data[..DENIED as usize]);
}

#[test]
fn reset_reaches_the_device_and_drops_pending_interrupts() {
    let host = Host::start();
    let mut client = host.client();
    host.link.interrupts().trigger_msi(0);
    client.reset().unwrap();
    host.expect(Event::Reset);
    let fds = client.attach_irqs(1, 1).unwrap();
    assert!(host.link.interrupts().trigger_msi(0));
    assert_eq!(wait_event(&fds[0], EVENT_TIMEOUT).unwrap(), 1);
}

#[test]
fn msi_reaches_the_client() {
    let host = Host::start();
    let mut client = host.client();
    let fds = client.attach_irqs(1, 4).unwrap();
    host.link.interrupts().trigger_msi(3);
    assert_eq!(wait_event(&fds[3], EVENT_TIMEOUT).unwrap(), 1);
    client.disable_irqs(1).unwrap();
    assert!(!host.link.interrupts().trigger_msi(3));
}

#[test]
fn intx_is_unmasked_by_a_message_or_by_a_descriptor() {
    let host = Host::start();
    let mut client = host.client();
    let fds = client.attach_irqs(0, 1).unwrap();
    host.link.interrupts().set_intx_level(true);
    assert_eq!(wait_event(&fds[0], EVENT_TIMEOUT).unwrap(), 1);
    client.unmask_intx().unwrap();
    assert_eq!(wait_event(&fds[0], EVENT_TIMEOUT).unwrap(), 1, "the level is still high");

    let unmask = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let request = vmm_glue::protocol::IrqSet { argsz: 20, flags: 4 | 16, index: 0, start: 0, count: 1 };
    client.irq_request(request, &[], &[unmask.as_fd()]).unwrap();
    rustix::io::write(&unmask, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(wait_event(&fds[0], EVENT_TIMEOUT).unwrap(), 1, "the level is still high");
}

#[test]
fn descriptors_where_none_belongs_are_refused() {
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(4096, false).unwrap();
    let error = client.request(Command::DEVICE_RESET, &[], &[file.as_fd()]).unwrap_err();
    assert_eq!(error.errno(), EINVAL);
    assert_eq!(host.link.counters().stray_fds.load(Relaxed), 1);
}

#[test]
fn more_descriptors_than_advertised_are_refused() {
    let host = Host::start();
    let mut client = host.client();
    let file = memory_file(4096, false).unwrap();
    let socket = client.stream().try_clone().unwrap();
    let request = vmm_glue::protocol::IrqSet { argsz: 20, flags: 4 | 32, index: 1, start: 0, count: 40 };
    let header = vmm_glue::protocol::Header::request(500, Command::DEVICE_SET_IRQS, 36, 0);
    let bytes = [header.as_bytes(), request.as_bytes()].concat();
    let fds = [file.as_fd(); 40];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    rustix::net::sendmsg(&socket, &[std::io::IoSlice::new(&bytes)], &mut control, rustix::net::SendFlags::empty())
        .unwrap();
    let reply = client.receive_message().unwrap();
    assert_eq!((reply.header.id, reply.header.flags & FLAG_ERROR), (500, FLAG_ERROR));
    assert_eq!(client.read32(BAR0, 0).unwrap(), 0);
}

#[test]
fn client_that_reads_error_replies_as_full_ones_gets_full_ones() {
    let host = Host::start();
    let mut client = host.client_as(CLOUD_HYPERVISOR_CAPABILITIES);
    let id = client.send(Command::REGION_READ, 0, RegionAccess { offset: DENIED, region: 0, count: 4 }.as_bytes(), &[]);
    let reply = client.receive_message().unwrap();
    assert_eq!(reply.header.id, id.unwrap());
    assert_eq!(reply.body.len(), 16 + 4);
    assert_eq!(reply.body[16..], [0xff; 4]);
    client.send(Command::DMA_UNMAP, 0, &[0; 24], &[]).unwrap();
    assert_eq!(client.receive_message().unwrap().body.len(), 24);
}

#[test]
fn messages_in_pieces_are_put_together() {
    let host = Host::start();
    let client = host.client();
    let header = vmm_glue::protocol::Header::request(7, Command::REGION_WRITE, 16 + 20, FLAG_NO_REPLY);
    let bytes = [header.as_bytes(), &write_body(BAR0, 8, &[1, 2, 3, 4])].concat();
    for byte in &bytes {
        client.send_raw(&[*byte], &[]).unwrap();
    }
    host.expect(Event::Write(RegionIndex::Bar0, 8, vec![1, 2, 3, 4]));
}
