//! The page is built by `npm run build` in `console/`, before cargo. What is embedded is read when this
//! crate is compiled, so cargo has to be told to compile it again when the page was built anew.

fn main() {
    println!("cargo:rerun-if-changed=../../console/dist");
}
