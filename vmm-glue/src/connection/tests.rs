//! Feeds arbitrary bytes, split at arbitrary points. The connection must not panic, must send one reply per request
//! that expects a reply, and must bound its output.

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::{FromBytes, IntoBytes};

use super::*;
use crate::echo::EchoDevice;
use crate::interrupts::IrqCounts;
use crate::protocol::{FLAG_NO_REPLY, FLAG_TYPE_REPLY};

const VERSION: &[u8] = b"\0\0\x01\0{\"capabilities\":{\"write_multiple\":true}}\0";

struct Bench {
    connection: Connection,
    device: EchoDevice,
}

impl Bench {
    fn new() -> Self {
        let link = Link::new(IrqCounts { intx: 1, msi: 2, msix: 4, err: 1, req: 1 }).unwrap();
        let client = ClientInfo { pid: 0, uid: 0, domain: None };
        let mut options = ServerOptions::default();
        options.memory.regions = 16;
        Self { connection: Connection::new(link, &options, client), device: EchoDevice::new(4096, 1, 2) }
    }

    fn negotiated() -> Self {
        let mut bench = Self::new();
        bench.feed(&message(0, Command::VERSION, 0, VERSION), vec![]).unwrap();
        assert!(bench.connection.is_negotiated());
        bench
    }

    /// Feeds bytes to the connection. Returns its replies.
    fn feed(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<u8>, Fatal> {
        let mut out = Vec::new();
        let mut fds = Some(fds);
        let mut rest = bytes;
        loop {
            rest = self.connection.handle_bytes(&mut self.device, rest, fds.take().unwrap_or_default())?;
            self.connection.work(&mut self.device)?;
            let paused = self.connection.pending_output() >= FLUSH_AT;
            out.extend(self.connection.output().take());
            if rest.is_empty() && !paused {
                return Ok(out);
            }
        }
    }
}

fn message(id: u16, command: Command, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
    [Header::request(id, command, size, flags).as_bytes(), body].concat()
}

fn replies(mut bytes: &[u8]) -> Vec<Header> {
    let mut all = vec![];
    while let Ok((header, _)) = Header::read_from_prefix(bytes) {
        bytes = &bytes[header.size as usize..];
        all.push(header);
    }
    assert!(bytes.is_empty());
    all
}

/// Generates numbers that are often close to a bound.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..64,
        Just(4096),
        Just(4095),
        Just(0x10000),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        Just(u64::MAX - 4095),
        (0u64..64).prop_map(|page| page * 4096),
        any::<u64>(),
    ]
}

/// Generates a body of 64-bit or 32-bit numbers, like that of most requests, or of arbitrary bytes.
fn body() -> impl Strategy<Value = Vec<u8>> {
    let words = prop::collection::vec(number(), 0..12)
        .prop_map(|numbers| numbers.into_iter().flat_map(u64::to_ne_bytes).collect());
    let halves = prop::collection::vec(number(), 0..12)
        .prop_map(|numbers| numbers.into_iter().flat_map(|number| (number as u32).to_ne_bytes()).collect());
    let bytes = prop::collection::vec(any::<u8>(), 0..100);
    prop_oneof![words, halves, bytes]
}

#[derive(Clone, Debug)]
struct Request {
    command: u16,
    no_reply: bool,
    body: Vec<u8>,
    fds: usize,
}

fn request() -> impl Strategy<Value = Request> {
    (0u16..20, any::<bool>(), body(), prop_oneof![5 => Just(0), 1 => 1usize..4])
        .prop_map(|(command, no_reply, body, fds)| Request { command, no_reply, body, fds })
}

fn descriptors(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()).collect()
}

proptest! {
    #[test]
    fn any_bytes_are_survived(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20), negotiate: bool) {
        let mut bench = if negotiate { Bench::negotiated() } else { Bench::new() };
        for chunk in chunks {
            if bench.feed(&chunk, descriptors(1)).is_err() {
                break;
            }
        }
        bench.connection.close(&mut bench.device);
    }

    #[test]
    fn every_request_that_wants_a_reply_gets_one(requests in prop::collection::vec(request(), 1..40)) {
        let mut bench = Bench::negotiated();
        for (id, Request { command, no_reply, body, fds }) in (100u16..).zip(requests) {
            let flags = if no_reply { FLAG_NO_REPLY } else { 0 };
            let out = bench.feed(&message(id, Command(command), flags, &body), descriptors(fds)).unwrap();
            let headers = replies(&out);
            prop_assert_eq!(headers.len(), usize::from(!no_reply));
            for header in headers {
                prop_assert_eq!((header.id, header.command), (id, command));
                prop_assert_eq!(header.flags & !crate::protocol::FLAG_ERROR, FLAG_TYPE_REPLY);
                prop_assert_eq!(header.flags & crate::protocol::FLAG_ERROR != 0, header.error != 0);
            }
        }
        bench.connection.close(&mut bench.device);
    }

    #[test]
    fn replies_do_not_depend_on_how_the_stream_is_cut(
        requests in prop::collection::vec(request(), 1..20),
        cuts in prop::collection::vec(1usize..200, 1..50),
    ) {
        let requests = requests.into_iter().filter(|request| request.fds == 0);
        let stream: Vec<u8> =
            (0u16..).zip(requests).flat_map(|(id, it)| message(id, Command(it.command), 0, &it.body)).collect();
        let whole = Bench::negotiated().feed(&stream, vec![]).unwrap();
        let mut bench = Bench::negotiated();
        let (mut out, mut rest) = (vec![], &stream[..]);
        for cut in cuts.into_iter().cycle() {
            let (head, tail) = rest.split_at(cut.min(rest.len()));
            out.extend(bench.feed(head, vec![]).unwrap());
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(out, whole);
    }
}

#[test]
fn replies_of_the_client_to_nothing_are_ignored() {
    let mut bench = Bench::negotiated();
    let header = Header { id: 9, command: 11, size: 16, flags: FLAG_TYPE_REPLY, error: 0 };
    assert!(bench.feed(header.as_bytes(), vec![]).unwrap().is_empty());
}

#[test]
fn output_pauses_the_input() {
    let mut bench = Bench::negotiated();
    let read = message(1, Command::REGION_READ, 0, RegionAccess { offset: 0, region: 0, count: 4096 }.as_bytes());
    let stream = read.repeat(100);
    let rest = bench.connection.handle_bytes(&mut bench.device, &stream, vec![]).unwrap();
    assert!(bench.connection.pending_output() < FLUSH_AT + 5000);
    bench.connection.output().take();
    let out = bench.feed(rest, vec![]).unwrap();
    assert!(!out.is_empty());
}
