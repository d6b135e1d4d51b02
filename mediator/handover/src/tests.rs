use super::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

const LONG_TIMEOUT: Duration = Duration::from_secs(30);
const SHORT_TIMEOUT: Duration = Duration::from_millis(50);

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn introduction() -> Introduction {
    let known = |name: &str, version| Known { name: name.to_owned(), version };
    Introduction { program: "0.2.0".into(), reads: vec![known("owner", 2), known("vgpu", 1)] }
}

/// Creates a file that contains `number`.
fn numbered(number: usize) -> OwnedFd {
    let mut file = tempfile_of(&number.to_le_bytes());
    file.rewind().unwrap();
    file.into()
}

fn tempfile_of(bytes: &[u8]) -> std::fs::File {
    let file = rustix::fs::memfd_create("a", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(file);
    file.write_all(bytes).unwrap();
    file
}

fn number(fd: OwnedFd) -> usize {
    let mut bytes = [0; 8];
    std::fs::File::from(fd).read_exact(&mut bytes).unwrap();
    usize::from_le_bytes(bytes)
}

fn package(descriptors: usize) -> Package {
    let name = |number: usize| format!("vm-{}.fd", number % 3);
    let descriptors = (0..descriptors).map(|at| (name(at), numbered(at))).collect();
    Package { file: vec![7; 100_000], descriptors }
}

/// Runs a sender and a receiver, and returns the results of both.
fn both<G: Send, T>(sender: impl FnOnce(OwnedFd) -> G + Send, receiver: impl FnOnce(OwnedFd) -> T) -> (G, T) {
    let (one, other) = pair();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| sender(one));
        let taken = receiver(other);
        (sender.join().unwrap(), taken)
    })
}

fn give(socket: OwnedFd) -> Result<(), Error> {
    let (sender, _) = Sender::meet(socket, LONG_TIMEOUT)?;
    sender.give(&package(3))?;
    sender.await_ready(LONG_TIMEOUT)?;
    sender.let_go()
}

fn take(socket: OwnedFd) -> Result<Package, Error> {
    let receiver = Receiver::connect(socket, &introduction())?;
    let package = receiver.take(LONG_TIMEOUT)?;
    receiver.ready()?;
    receiver.wait(LONG_TIMEOUT)?;
    Ok(package)
}

#[test]
fn all_parts_arrive_in_order() {
    for count in [0, 1, 128, 129, 500] {
        let (given, taken) = both(
            |socket| {
                let (sender, who) = Sender::meet(socket, LONG_TIMEOUT)?;
                assert_eq!(who, introduction());
                sender.give(&package(count))?;
                sender.await_ready(LONG_TIMEOUT)?;
                sender.let_go()
            },
            take,
        );
        given.unwrap();
        let mut taken = taken.unwrap();
        assert_eq!(taken.file, vec![7; 100_000]);
        for of in 0..3 {
            let numbers: Vec<usize> = taken.take(&format!("vm-{of}.fd")).into_iter().map(number).collect();
            assert_eq!(numbers, (of..count).step_by(3).collect::<Vec<_>>());
        }
        assert!(taken.descriptors.is_empty());
    }
}

#[test]
fn giver_keeps_all_unless_the_taker_is_ready() {
    let refused = both(give, |socket| {
        let receiver = Receiver::connect(socket, &introduction()).unwrap();
        receiver.take(LONG_TIMEOUT).unwrap();
        receiver.refuse("VM 3: its guest sees other registers").unwrap();
    });
    assert!(matches!(refused.0, Err(Error::Refused(why)) if why.contains("VM 3")));
    // The receiver exits at various steps.
    assert!(matches!(both(give, drop).0, Err(Error::Ended(_))));
    let ended = both(give, |socket| drop(Receiver::connect(socket, &introduction()).unwrap()));
    assert!(matches!(ended.0, Err(Error::Ended(_))), "{:?}", ended.0);
    let ended = both(give, |socket| {
        let receiver = Receiver::connect(socket, &introduction()).unwrap();
        drop(receiver.take(LONG_TIMEOUT).unwrap());
    });
    assert!(matches!(ended.0, Err(Error::Ended(_))), "{:?}", ended.0);
    // The receiver does not respond.
    let silent = both(
        |socket| {
            let (sender, _) = Sender::meet(socket, LONG_TIMEOUT)?;
            sender.give(&package(1))?;
            sender.await_ready(SHORT_TIMEOUT)
        },
        |socket| {
            let receiver = Receiver::connect(socket, &introduction()).unwrap();
            receiver.take(LONG_TIMEOUT).unwrap();
            assert!(matches!(receiver.wait(LONG_TIMEOUT), Err(Error::Ended(_))), "the receiver owns the package");
        },
    );
    assert!(matches!(silent.0, Err(Error::Silent(..))), "{:?}", silent.0);
    let (one, _other) = pair();
    assert!(matches!(Sender::meet(one, SHORT_TIMEOUT), Err(Error::Silent(..))));
}

#[test]
fn taker_has_nothing_unless_the_giver_lets_go() {
    assert!(matches!(both(drop, take).1, Err(Error::Ended(_))));
    let ended = both(|socket| drop(Sender::meet(socket, LONG_TIMEOUT).unwrap()), take);
    assert!(matches!(ended.1, Err(Error::Ended(_))), "{:?}", ended.1);
    let ended = both(
        |socket| {
            let (sender, _) = Sender::meet(socket, LONG_TIMEOUT).unwrap();
            sender.give(&package(200)).unwrap();
            sender.await_ready(LONG_TIMEOUT).unwrap();
        },
        take,
    );
    assert!(matches!(ended.1, Err(Error::Ended(_))), "{:?}", ended.1);
}

#[test]
fn foreign_peer_and_other_version_give_different_errors() {
    let send =
        |socket: &OwnedFd, bytes: &[u8]| rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL).unwrap();
    for (bytes, version) in
        [(&b"GPUH\x02\0\0\0"[..], true), (b"GET / HTTP/1.1", false), (b"GPUH", false), (b"GPUH\x01\0\0\0\xff", false)]
    {
        let (one, other) = pair();
        send(&other, bytes);
        match Sender::meet(one, LONG_TIMEOUT) {
            Err(Error::Version(2, 1)) => assert!(version),
            Err(Error::Protocol(_)) => assert!(!version),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn file_that_the_giver_could_change_is_refused() {
    let (one, other) = pair();
    let wire = wire::Wire::new(one);
    let receiver = Receiver::connect(other, &introduction()).unwrap();
    let file = tempfile_of(&[1; 64]);
    wire.send(&wire::Message::Offer { bytes: 64, descriptors: 0 }, &[file.as_fd()]).unwrap();
    assert!(matches!(receiver.take(LONG_TIMEOUT), Err(Error::Io(..) | Error::Protocol(_))));
    for (bytes, descriptors) in [(65, 0), (64, 1 << 20)] {
        let sealed = package::sealed(&[1; 64]).unwrap();
        wire.send(&wire::Message::Offer { bytes, descriptors }, &[sealed.as_fd()]).unwrap();
        assert!(receiver.take(LONG_TIMEOUT).is_err());
    }
    let sealed = package::sealed(&[1; 64]).unwrap();
    wire.send(&wire::Message::Offer { bytes: 64, descriptors: 1 }, &[sealed.as_fd()]).unwrap();
    wire.send(&wire::Message::Descriptors(vec!["a".into(), "b".into()]), &[sealed.as_fd()]).unwrap();
    assert!(matches!(receiver.take(LONG_TIMEOUT), Err(Error::Protocol(_))));
}

#[test]
fn too_much_is_not_given() {
    let (one, other) = pair();
    let _taker = Receiver::connect(other, &introduction()).unwrap();
    let (sender, _) = Sender::meet(one, LONG_TIMEOUT).unwrap();
    let mut package = package(1);
    package.descriptors[0].0 = "n".repeat(200);
    assert!(matches!(sender.give(&package), Err(Error::TooMuch(..))));
}
