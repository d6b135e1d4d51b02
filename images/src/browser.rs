//! Debian's headless Chromium. A test mounts the browser's folder as the root file system, because the browser uses
//! fixed paths.

/// Path of the browser in its folder.
pub const PROGRAM: &str = "/usr/lib/chromium/chromium-headless-shell";
