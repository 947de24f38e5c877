# says.sh: a check for tests of what isn't there, and of what is said then. For scripts that have pass, fail and run, which runs the program
# with the variables and arguments that it is given and nothing else of the environment.

# says NAME TEXT... -- then as run: the program fails, and its message holds each text (a ~ stands for a space).
says() {
    name=$1
    shift
    texts=
    while [ "$1" != -- ]; do
        texts="$texts $1"
        shift
    done
    shift
    out=$(run "$@") && { fail "says_$name" "it succeeded: $out"; return; }
    for text in $texts; do
        text=$(echo "$text" | tr '~' ' ')
        case $out in
            *"$text"*) ;;
            *) fail "says_$name" "\"$text\" isn't in: $out"; return ;;
        esac
    done
    pass "says_$name"
}
