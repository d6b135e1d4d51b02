//! Author of a change. A request carries its author from the connection to the threads that work on it, so the code in
//! between need not pass it as an argument.

use std::cell::RefCell;

use api::{Author, AuthorKind};

thread_local! {
    static OF_THREAD: RefCell<Option<Author>> = const { RefCell::new(None) };
}

tokio::task_local! {
    static OF_REQUEST: Author;
}

/// Returns the daemon as an author.
#[must_use]
pub const fn daemon() -> Author {
    Author { kind: AuthorKind::Daemon, uid: None, pid: None, program: None }
}

/// Returns the configuration file as an author.
#[must_use]
pub const fn configuration() -> Author {
    Author { kind: AuthorKind::Configuration, uid: None, pid: None, program: None }
}

/// Returns the client of a connection as an author. Reads the process name immediately, because the process may exit
/// before its request completes.
#[must_use]
pub fn client(uid: Option<u32>, pid: Option<i32>) -> Author {
    let pid = pid.filter(|pid| *pid > 0);
    let name = pid.and_then(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    let program = name.map(|name| name.trim_end_matches('\n').to_owned()).filter(|name| !name.is_empty());
    Author { kind: AuthorKind::Client, uid, pid, program }
}

/// Returns the author of the changes that this thread makes: the daemon, unless [`acting`] names another one.
pub(crate) fn current() -> Author {
    OF_THREAD.with_borrow(Clone::clone).unwrap_or_else(daemon)
}

/// Calls `work`, and attributes the changes that it makes on this thread to this author.
pub fn acting<T>(author: Author, work: impl FnOnce() -> T) -> T {
    /// Restores the previous author on drop, even after a panic, because threads are reused.
    struct Before(Option<Author>);

    impl Drop for Before {
        fn drop(&mut self) {
            let before = self.0.take();
            OF_THREAD.with_borrow_mut(|now| *now = before);
        }
    }

    let _before = Before(OF_THREAD.with_borrow_mut(|now| now.replace(author)));
    work()
}

/// Returns the author of the request that this task serves, for passing to [`acting`] on another thread.
#[must_use]
pub fn of_request() -> Author {
    OF_REQUEST.try_with(Clone::clone).unwrap_or_else(|_| daemon())
}

/// Serves a request on behalf of the given author.
pub(crate) async fn requesting<T>(author: Author, serve: impl Future<Output = T>) -> T {
    OF_REQUEST.scope(author, serve).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn author_of_thread_ends_with_its_work_even_after_panic() {
        assert_eq!(current(), daemon());
        acting(configuration(), || {
            assert_eq!(current(), configuration());
            acting(client(Some(7), None), || assert_eq!(current().uid, Some(7)));
            assert_eq!(current(), configuration());
        });
        let ended = std::panic::catch_unwind(|| acting(configuration(), || panic!("as the test wants it")));
        assert!(ended.is_err());
        assert_eq!(current(), daemon());
    }

    #[test]
    fn client_has_its_program_if_visible() {
        let own = client(Some(5), i32::try_from(std::process::id()).ok());
        assert!(own.program.is_some());
        assert_eq!(
            own.in_words().unwrap(),
            format!("{}, user 5, process {}", own.program.unwrap(), std::process::id())
        );
        assert_eq!(client(Some(5), Some(0)).in_words().unwrap(), "user 5");
    }
}
