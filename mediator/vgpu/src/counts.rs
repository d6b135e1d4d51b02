//! Counts of events, each declared once: its field, what it counts, and the name by which operators see it. `cargo xtask check`
//! refuses one that nothing counts.

/// Declares a struct of counts since the VM was created. Each field has a doc line and the name of its metric.
macro_rules! counts {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])+ $field:ident: $metric:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct $name {
            $($(#[$doc])+ pub(crate) $field: u64,)+
        }

        impl $name {
            /// Returns all of them, by the names that operators see.
            pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$(($metric, self.$field)),+].into_iter()
            }

            /// Those that `of` knows by that name; the others begin anew.
            #[allow(dead_code, reason = "not all are of what goes on in another process")]
            pub(crate) fn of(of: impl Fn(&str) -> Option<u64>) -> Self {
                Self { $($field: of($metric).unwrap_or(0)),+ }
            }
        }
    };
}

pub(crate) use counts;
