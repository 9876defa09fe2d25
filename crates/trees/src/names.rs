//! Names: which steps make a change of them durable, and in which order.
//!
//! - **Made:** the file first, then its directory. A crash in between leaves a file without a name, or one under its name that
//!   nobody was told of; never a name that was answered without what its maker gave it.
//! - **Removed:** the directory. What was kept of the file elsewhere goes only after that.
//! - **Renamed:** the new directory first. A file system that does not keep the two together shows two names after a crash
//!   in between, and never none.
//! - **Linked:** the file, which counts its names, then the directory.

/// Steps in a file system. Nothing is durable when one returns, but what was synced.
pub trait Names {
    /// A file or directory that was found.
    type Node;
    /// Why a step failed.
    type Error;
    /// Finds a name.
    fn find(&self, dir: &Self::Node, name: &[u8]) -> Result<Self::Node, Self::Error>;
    /// Takes a name away.
    fn unlink(&self, dir: &Self::Node, name: &[u8], directory: bool) -> Result<(), Self::Error>;
    /// Gives what has a name another one, in place of what has that.
    fn rename(
        &self,
        from: (&Self::Node, &[u8]),
        to: (&Self::Node, &[u8]),
    ) -> Result<(), Self::Error>;
    /// Gives a file one more name.
    fn link(&self, file: &Self::Node, dir: &Self::Node, name: &[u8]) -> Result<(), Self::Error>;
    /// Makes a file's data and attributes durable.
    fn sync(&self, file: &Self::Node) -> Result<(), Self::Error>;
    /// Makes the names in a directory durable.
    fn sync_names(&self, dir: &Self::Node) -> Result<(), Self::Error>;
}

/// Makes something new: `make` gives it its name, `dress` what else its maker wants.
pub fn create<N: Names>(
    names: &N,
    dir: &N::Node,
    name: &[u8],
    directory: bool,
    make: impl FnOnce() -> Result<(), N::Error>,
    dress: impl FnOnce(&N::Node) -> Result<(), N::Error>,
) -> Result<N::Node, N::Error> {
    make()?;
    let made = names.find(dir, name).and_then(|node| {
        dress(&node)?;
        names.sync(&node)?;
        names.sync_names(dir)?;
        Ok(node)
    });
    if made.is_err() {
        // As if it had never been. Should that fail as well, it is there without content.
        let _ = names.unlink(dir, name, directory);
    }
    made
}

/// Takes a name away. `gone` hears of it before it is durable, and must keep what a name that comes back needs.
pub fn remove<N: Names>(
    names: &N,
    dir: &N::Node,
    name: &[u8],
    directory: bool,
    gone: impl FnOnce(),
) -> Result<(), N::Error> {
    names.unlink(dir, name, directory)?;
    gone();
    names.sync_names(dir)
}

/// Renames. `same`: within one directory. `moved` hears of it before it is durable, as above.
pub fn rename<N: Names>(
    names: &N,
    from: (&N::Node, &[u8]),
    to: (&N::Node, &[u8]),
    same: bool,
    moved: impl FnOnce(),
) -> Result<(), N::Error> {
    names.rename(from, to)?;
    moved();
    names.sync_names(to.0)?;
    if same {
        return Ok(());
    }
    names.sync_names(from.0)
}

/// Gives a file one more name.
pub fn link<N: Names>(
    names: &N,
    file: &N::Node,
    dir: &N::Node,
    name: &[u8],
) -> Result<(), N::Error> {
    names.link(file, dir, name)?;
    names.sync(file)?;
    names.sync_names(dir)
}
