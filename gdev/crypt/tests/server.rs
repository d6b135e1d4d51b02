//! Tests the server with well-behaved and hostile clients, using the CPU.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use gdev_crypt::cipher::{CardMin, Cipher};
use gdev_crypt::key::Key;
use gdev_crypt::nbd;
use gdev_crypt::volume::Volume;
use proptest::prelude::*;

const BYTES: u64 = 1 << 20;

fn key() -> Key {
    Key::new(std::array::from_fn(|index| index as u8)).expect("a key")
}

fn volume(folder: &Path) -> Arc<Volume> {
    let path = folder.join("disk");
    std::fs::File::create(&path).expect("a file").set_len(BYTES).expect("a size");
    let cipher = Cipher::new(key(), None, CardMin::Measured).expect("a cipher");
    Arc::new(Volume::open(&path, cipher).expect("a volume"))
}

type Served = JoinHandle<std::io::Result<()>>;

fn start(volume: &Arc<Volume>) -> (UnixStream, Served) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let volume = Arc::clone(volume);
    (ours, std::thread::spawn(move || nbd::serve(theirs, &volume)))
}

/// A client that follows the protocol.
struct Client(UnixStream);

impl Client {
    fn read<const COUNT: usize>(&mut self) -> [u8; COUNT] {
        let mut bytes = [0; COUNT];
        self.0.read_exact(&mut bytes).expect("an answer");
        bytes
    }

    fn send(&mut self, parts: &[&[u8]]) {
        self.0.write_all(&parts.concat()).expect("a server");
    }

    fn option(&mut self, option: u32, data: &[u8]) -> (u32, Vec<u8>) {
        self.send(&[b"IHAVEOPT", &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data]);
        self.option_reply()
    }

    fn option_reply(&mut self) -> (u32, Vec<u8>) {
        assert_eq!(u64::from_be_bytes(self.read()), 0x3_e889_0455_65a9);
        self.read::<4>();
        let (kind, length) = (u32::from_be_bytes(self.read()), u32::from_be_bytes(self.read()));
        let mut data = vec![0; length as usize];
        self.0.read_exact(&mut data).expect("the data");
        (kind, data)
    }

    /// Negotiates with `GO`.
    fn new(stream: UnixStream) -> Self {
        let mut client = Self::begin(stream);
        let (kind, data) = client.option(7, &[0, 0, 0, 0, 0, 1, 0, 3]);
        assert_eq!((kind, &data[..10]), (3, &[&[0, 0][..], &BYTES.to_be_bytes()].concat()[..]));
        let (kind, data) = client.option_reply();
        assert_eq!((kind, &data[..6]), (3, &[0, 3, 0, 0, 2, 0][..]));
        assert_eq!(client.option_reply().0, 1);
        client
    }

    fn begin(stream: UnixStream) -> Self {
        let mut client = Self(stream);
        assert_eq!(&client.read::<16>(), b"NBDMAGICIHAVEOPT");
        assert_eq!(client.read::<2>(), [0, 3]);
        client.send(&[&[0, 0, 0, 3]]);
        client
    }

    fn request(&mut self, flags: u16, kind: u16, offset: u64, length: u32, data: &[u8]) -> u32 {
        let magic = 0x2560_9513u32.to_be_bytes();
        let cookie = 0x1234_5678_9abc_def0u64.to_be_bytes();
        self.send(&[
            &magic,
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie,
            &offset.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ]);
        assert_eq!(u32::from_be_bytes(self.read()), 0x6744_6698);
        let code = u32::from_be_bytes(self.read());
        assert_eq!(self.read::<8>(), cookie);
        code
    }
}

#[test]
fn written_sectors_are_read_back_and_encrypted_in_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let volume = volume(folder.path());
    let (stream, served) = start(&volume);
    let mut client = Client::new(stream);
    let plain: Vec<u8> = (0..4096u32).map(|index| (index >> 4) as u8).collect();
    assert_eq!(client.request(1, 1, 8192, 4096, &plain), 0);
    assert_eq!(client.request(0, 3, 0, 0, &[]), 0);
    assert_eq!(client.request(0, 0, 8192, 4096, &[]), 0);
    assert_eq!(client.read::<4096>(), plain[..]);
    let stored = std::fs::read(folder.path().join("disk")).expect("the file");
    assert!(stored[..8192].iter().chain(&stored[12288..]).all(|byte| *byte == 0), "other sectors have changed");
    // The file must not contain the plaintext.
    assert_ne!(stored[8192..8704], plain[..512]);
    let mut again = stored[8192..12288].to_vec();
    let cipher = Cipher::new(key(), None, CardMin::Measured).expect("a cipher");
    cipher.run(gdev_crypt::tables::Direction::Decrypt, 16, &mut again);
    assert_eq!(again, plain);
    client.send(&[&0x2560_9513u32.to_be_bytes(), &[0, 0, 0, 2], &[0; 20]]);
    served.join().expect("no panic").expect("a clean end");
}

#[test]
fn requests_outside_the_volume_are_refused_by_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let volume = volume(folder.path());
    let (stream, served) = start(&volume);
    let mut client = Client::new(stream);
    assert_eq!(client.request(0, 0, BYTES, 512, &[]), 75);
    assert_eq!(client.request(0, 0, u64::MAX - 100, 512, &[]), 75);
    assert_eq!(client.request(0, 0, 0, 33 << 20, &[]), 75);
    assert_eq!(client.request(0, 0, 100, 512, &[]), 22);
    assert_eq!(client.request(0, 0, 0, 0, &[]), 22);
    assert_eq!(client.request(0, 1, BYTES - 512, 1024, &[1; 1024]), 28);
    assert_eq!(client.request(0, 1, 0, 100, &[1; 100]), 22);
    assert_eq!(client.request(0, 99, 0, 512, &[]), 22);
    assert_eq!(client.request(0, 0, 0, 512, &[]), 0);
    client.read::<512>();
    drop(client);
    served.join().expect("no panic").expect("a clean end");
}

#[test]
fn options_that_do_not_fit_are_answered_with_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let volume = volume(folder.path());
    let (stream, served) = start(&volume);
    let mut client = Client::begin(stream);
    let error = |number: u32| 1 << 31 | number;
    // Test STARTTLS, structured replies, and an unknown option.
    for option in [5, 8, 77] {
        assert_eq!(client.option(option, &[]).0, error(1));
    }
    assert_eq!(client.option(7, &[0, 0, 0, 9, 0, 0]).0, error(3));
    assert_eq!(client.option(7, &[0, 0, 0, 1, b'x', 0, 0]).0, error(6));
    assert_eq!(client.option(6, &vec![0; 9 << 10]).0, error(9));
    assert_eq!(client.option(3, &[1]).0, error(3));
    assert_eq!(client.option(3, &[]), (2, vec![0; 4]));
    assert_eq!(client.option_reply().0, 1);
    assert_eq!(client.option(2, &[]).0, 1);
    served.join().expect("no panic").expect("a clean end");
    // `EXPORT_NAME`, the older option, gets the export's size instead of an option reply.
    let (stream, served) = start(&volume);
    let mut client = Client::begin(stream);
    client.send(&[b"IHAVEOPT", &1u32.to_be_bytes(), &[0; 4]]);
    assert_eq!(u64::from_be_bytes(client.read()), BYTES);
    client.read::<2>();
    assert_eq!(client.request(0, 3, 0, 0, &[]), 0);
    drop(client);
    served.join().expect("no panic").expect("a clean end");
}

/// Generates a hostile client's messages: well-formed ones with arbitrary fields, and arbitrary bytes.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let option =
        (0u32..12, 0u32..70_000, prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(option, length, data)| {
            [b"IHAVEOPT".to_vec(), option.to_be_bytes().into(), length.to_be_bytes().into(), data].concat()
        });
    let go = Just([b"IHAVEOPT".to_vec(), vec![0, 0, 0, 7, 0, 0, 0, 6], vec![0; 6]].concat());
    let request = (any::<u16>(), 0u16..6, any::<u64>(), 0u64..2 << 20, 0u32..8192, 0usize..4096).prop_map(
        |(flags, kind, cookie, offset, length, data)| {
            [
                0x2560_9513u32.to_be_bytes().to_vec(),
                flags.to_be_bytes().into(),
                kind.to_be_bytes().into(),
                cookie.to_be_bytes().into(),
                offset.to_be_bytes().into(),
                length.to_be_bytes().into(),
                vec![7; data],
            ]
            .concat()
        },
    );
    prop_oneof![option, go, request, prop::collection::vec(any::<u8>(), 0..64)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn hostile_clients_end_only_their_own_connection(
        flags in prop_oneof![Just(3u32), any::<u32>()],
        messages in prop::collection::vec(message(), 0..12),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let volume = volume(folder.path());
        let (mut hostile, served) = start(&volume);
        let mut reader = hostile.try_clone().expect("another descriptor");
        let drain = std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
        let _ = hostile.write_all(&[flags.to_be_bytes().to_vec(), messages.concat()].concat());
        let _ = hostile.shutdown(std::net::Shutdown::Write);
        let _ = served.join().expect("no panic");
        let _ = hostile.shutdown(std::net::Shutdown::Both);
        let _ = drain.join();
        let (stream, served) = start(&volume);
        let mut good = Client::new(stream);
        prop_assert_eq!(good.request(0, 1, 0, 512, &[9; 512]), 0);
        prop_assert_eq!(good.request(0, 0, 0, 512, &[]), 0);
        prop_assert_eq!(good.read::<512>(), [9; 512]);
        drop(good);
        served.join().expect("no panic").expect("a clean end");
    }
}
