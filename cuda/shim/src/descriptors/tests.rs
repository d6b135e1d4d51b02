//! Tests the numbers of the library's descriptors.
//!
//! UNSAFETY: forks.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use super::*;

/// Wraps a descriptor as if it had been received with a message.
pub fn kept(descriptor: OwnedFd) -> ChunkDescriptor {
    let mut all = moved(vec![(Mark::new(descriptor.as_raw_fd()), descriptor)]);
    let (mark, descriptor) = all.remove(0);
    ChunkDescriptor(Arc::new(Inner { mark, descriptor }))
}

fn is_marked(number: i32) -> bool {
    let (word, bit) = place(number).expect("a place");
    OURS[word].load(Ordering::SeqCst) & bit != 0
}

fn one() -> OwnedFd {
    OwnedFd::from(std::os::unix::net::UnixStream::pair().expect("a pair").0)
}

/// Runs `work` in a child with its own limit on open files. Returns true if `work` succeeds.
fn in_child(soft: u64, work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `work` and exits without running the parent's code. Its limit does not affect other tests.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: 4096 };
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
            libc::_exit(i32::from(!work()));
        }
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn descriptor_number_is_above_limit_and_unmarked_on_drop() {
    let all: Vec<OwnedFd> = (0..100).map(|_| one()).collect();
    assert!(in_child(512, || {
        let number = |kept: &ChunkDescriptor| kept.as_fd().as_raw_fd();
        let all: Vec<ChunkDescriptor> = all.into_iter().map(kept).collect();
        let is_high =
            |kept: &ChunkDescriptor| number(kept) >= LOWEST && kept.lasting().is_some() && is_marked(number(kept));
        let are_high = all.iter().all(is_high);
        // All descriptors must work, and the program's limit must be unchanged.
        let are_good = all.iter().all(|kept| kept.as_fd().try_clone_to_owned().is_ok());
        let is_kept = limit().is_some_and(|limit| limit.rlim_cur == 512);
        let numbers: Vec<i32> = all.iter().map(number).collect();
        drop(all);
        are_high && are_good && is_kept && !numbers.into_iter().any(is_marked)
    }));
}

#[test]
fn descriptors_are_sent_beyond_the_limit_of_a_user() {
    let (_owner, tenant) = Link::pair().expect("a pair");
    let tenant = Connection { _mark: Mark::new(-1), link: tenant };
    let all: Vec<OwnedFd> = (0..64).map(|_| one()).collect();
    let borrowed: Vec<BorrowedFd<'_>> = all.iter().map(|one| one.as_fd()).collect();
    let chunk = |id| cuda_protocol::Adopted {
        card: 0,
        id: cuda_protocol::ChunkId(id),
        place: cuda_protocol::Place::Host,
        descriptor: true,
    };
    let message = FromTenant::Adopt { chunks: (0..64).map(chunk).collect(), more: true };
    assert!(in_child(64, || {
        // Root may have any number of descriptors in flight, so switch to another user.
        // SAFETY: this affects only this child.
        unsafe { libc::setuid(54_321) };
        let direct = (0..3).all(|_| tenant.link.send_now(&message, &borrowed).is_ok());
        !direct && (0..3).all(|_| tenant.send_many(&message, &borrowed).is_ok())
    }));
}

#[test]
fn descriptors_are_received_when_program_has_no_free_number() {
    let (owner, tenant) = Link::pair().expect("a pair");
    let tenant = Connection { _mark: Mark::new(-1), link: tenant };
    let chunk = cuda_protocol::Chunk { id: cuda_protocol::ChunkId(1), place: cuda_protocol::Place::Device };
    let sent = FromOwner::Granted { request: 1, chunks: vec![chunk; 3], more: false };
    let descriptors = [one(), one(), one()];
    owner.try_send(&sent, &descriptors.each_ref().map(|one| one.as_fd())).expect("sent");
    // The limit does not permit any more descriptors.
    assert!(in_child(3, || {
        let Ok((message, kept)) = tenant.receive_with_descriptors(true) else { return false };
        message == sent && kept.len() == 3 && kept.iter().all(|kept| kept.lasting().is_some())
    }));
}
